"use strict";
// Keyboard shortcuts and the choice between dark and light, on every page.
(() => {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    localStorage.setItem("kapelle-theme", root.dataset.theme);
    document.dispatchEvent(new Event("theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));

  const keys = document.getElementById("keys");
  document.getElementById("help").addEventListener("click", () => keys.showModal());
  keys.addEventListener("click", (event) => event.target === keys && keys.close());

  const items = () => [...document.querySelectorAll("[data-item]")].filter((item) => item.getClientRects().length);
  let at = -1;
  const move = (by) => {
    const all = items();
    if (!all.length) return;
    const now = all.indexOf(document.querySelector("[data-item].at"));
    at = Math.max(0, Math.min(all.length - 1, (now < 0 ? (by > 0 ? -1 : all.length) : now) + by));
    all.forEach((item, k) => item.classList.toggle("at", k === at));
    const target = all[at].querySelector("a") || all[at];
    if (target === all[at]) target.tabIndex = -1;
    target.focus({ preventScroll: true });
    all[at].scrollIntoView({ block: "nearest" });
  };
  const follow = (rel) => document.querySelector(`a[rel="${rel}"]`)?.click();
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input:not([type=checkbox]):not([type=range]), textarea, select");
    if (event.key === "Escape" && typing) event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
    const action = {
      j: () => move(1),
      k: () => move(-1),
      "/": () => document.querySelector("[data-search]")?.focus(),
      "?": () => keys.showModal(),
      "[": () => follow("prev"),
      "]": () => follow("next"),
      u: () => follow("up"),
    }[event.key];
    if (action) {
      event.preventDefault();
      action();
    }
  });

  // The table of episodes keeps its filters: going up one level leads to the table as it was last shown.
  const [, run] = location.pathname.match(/^\/run\/([^/]+)\/episodes$/) || [];
  if (run) sessionStorage.setItem(`episodes of ${run}`, location.search);
  for (const back of document.querySelectorAll("a[data-back]")) {
    const [, table, own] = back.pathname.match(/^(\/run\/([^/]+)\/episodes)$/) || [];
    const kept = sessionStorage.getItem(`episodes of ${own}`);
    if (kept) back.href = table + kept;
  }

  // While episodes are being read, show what was found so far; reload the whole page when all are read and the user is not typing.
  const progress = document.querySelector("[data-indexing]");
  const look = async () => {
    const answer = await fetch(location.href).catch(() => null);
    const page = answer?.ok ? new DOMParser().parseFromString(await answer.text(), "text/html") : null;
    const now = page?.querySelector("[data-indexing]");
    if (now) progress.replaceChildren(...now.childNodes);
    else if (page && !document.activeElement?.closest("form")) return location.reload();
    setTimeout(look, 2000);
  };
  if (progress) setTimeout(look, 2000);
})();
