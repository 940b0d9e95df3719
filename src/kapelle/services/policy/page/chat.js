"use strict";

// Text from models is always set as text, so that it never becomes part of the page's markup.
const at = (id) => document.getElementById(id);
let messages = [];

function block(who, kind) {
  const article = document.createElement("article");
  const name = document.createElement("b");
  const words = document.createElement("span");
  article.className = kind;
  name.textContent = who;
  article.append(name, words);
  at("conversation").append(article);
  return {
    add(text) {
      words.textContent += text;
      article.scrollIntoView({ block: "end" });
    },
  };
}

// Yields the values in a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(model) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model, messages, stream: true }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const speaking = {};
  let whole = null;
  let text = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const said = event.kapelle;
    if (said && said.agent) {
      if (said.begins) speaking[said.agent] = block(said.agent, "agent");
      speaking[said.agent].add(said.text);
    }
    const words = event.choices.length ? event.choices[0].delta.content : "";
    if (words) {
      whole = whole || block(model, "answer");
      whole.add(words);
      text += words;
    }
  }
  messages.push({ role: "assistant", content: text });
}

at("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const words = at("words").value;
  messages.push({ role: "user", content: words });
  block("you", "question").add(words);
  at("words").value = "";
  at("send").disabled = true;
  try {
    await answer(at("model").value);
  } catch (error) {
    messages.pop();
    block("error", "wrong").add(error.message);
  } finally {
    at("send").disabled = false;
    at("words").focus();
  }
});

function anew() {
  messages = [];
  at("conversation").replaceChildren();
}

at("anew").addEventListener("click", anew);
at("model").addEventListener("change", anew);
at("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !at("send").disabled) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});

(async () => {
  const listed = await (await fetch("v1/models")).json();
  for (const model of listed.data) {
    const option = document.createElement("option");
    option.textContent = model.id;
    at("model").append(option);
  }
})();
