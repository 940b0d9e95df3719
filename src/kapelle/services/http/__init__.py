"""Plain HTTP for services: where one listens, who may call it, and what it answers when something is wrong."""
