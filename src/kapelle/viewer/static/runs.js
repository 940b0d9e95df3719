"use strict";
// The list of runs: filter it, sort it, and reload it whenever a run writes.
(() => {
  const table = document.getElementById("runs");
  const filter = document.getElementById("filter");
  const query = new URLSearchParams(location.search);
  const body = () => table.tBodies[0];
  filter.value = query.get("q") || "";
  let sorted = query.get("sort") === null ? null : Number(query.get("sort"));
  let down = query.get("down") === "1";

  const value = (row) => {
    const cell = row.cells[sorted];
    return cell ? (cell.dataset.value ?? cell.textContent.trim()) : "";
  };
  const arrange = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of body().rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    table.querySelectorAll("th").forEach((head, k) => {
      if (k === sorted) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    if (sorted !== null) {
      const numbers = table.tHead.rows[0].cells[sorted]?.dataset.sort === "number";
      const order = (a, b) => (numbers ? Number(value(a)) - Number(value(b)) : value(a).localeCompare(value(b)));
      const rows = [...body().rows].sort((a, b) => (down ? order(b, a) : order(a, b)));
      body().append(...rows);
    }
  };
  const keep = () => {
    const kept = new URLSearchParams();
    if (filter.value) kept.set("q", filter.value);
    if (sorted !== null) {
      kept.set("sort", sorted);
      if (down) kept.set("down", "1");
    }
    history.replaceState(null, "", kept.size ? `?${kept}` : location.pathname);
  };
  filter.addEventListener("input", () => { arrange(); keep(); });
  table.querySelectorAll("th[data-sort] button").forEach((button) =>
    button.addEventListener("click", () => {
      const column = button.closest("th").cellIndex;
      down = sorted === column ? !down : button.closest("th").dataset.sort === "number";
      sorted = column;
      arrange();
      keep();
    }),
  );
  // Choose all rows that the filter shows, or none.
  const every = document.getElementById("every");
  every.addEventListener("change", () => { 
    for (const row of body().rows) {
      const box = row.querySelector("input");
      if (box && !row.hidden) box.checked = every.checked;
    }
  });
  arrange();

  let waiting = null;
  const again = async () => {
    waiting = null;
    const answer = await fetch(location.href).catch(() => null);
    if (!answer?.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.querySelector("#runs tbody");
    const named = (row) => row?.querySelector("input")?.value;
    const at = named(body().querySelector(".at")), focus = document.activeElement;
    const focused = body().contains(focus) ? [named(focus.closest("tr")), focus.tagName] : [];
    const chosen = new Set([...body().querySelectorAll("input:checked")].map((box) => box.value));
    fresh.querySelectorAll("input").forEach((box) => { box.checked = chosen.has(box.value); });
    body().replaceWith(fresh);
    arrange();
    // The current row and the focus stay the same.
    for (const row of body().rows) {
      row.classList.toggle("at", at !== undefined && named(row) === at);
      if (focused[0] !== undefined && named(row) === focused[0]) row.querySelector(focused[1])?.focus({ preventScroll: true });
    }
  };
  const news = new EventSource("/events");
  news.addEventListener("changed", () => { waiting ??= setTimeout(again, 200); });
})();
