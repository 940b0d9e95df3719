"use strict";
// Before anything is drawn: the reader's choice of dark or light, if there is one.
{
  const chosen = localStorage.getItem("kapelle-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}
