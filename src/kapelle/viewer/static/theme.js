"use strict";
// Applies the user's choice of dark or light, if there is one, before anything is drawn.
{
  const chosen = localStorage.getItem("kapelle-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}
