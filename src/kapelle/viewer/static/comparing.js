"use strict";
// The page that compares runs: a choice is drawn at once, and what the curves show (axis, zoom, log, what is hidden) is kept.
(() => {
  const form = document.getElementById("grouping");
  form?.addEventListener("change", () => {
    const query = new URLSearchParams(new FormData(form));
    const shown = new URLSearchParams(location.search);
    for (const name of ["x", "smooth", "q", "log", "zoom"]) if (shown.get(name)) query.set(name, shown.get(name));
    for (const name of ["off", "only"]) for (const key of shown.getAll(name)) query.append(name, key);
    for (const [name, value] of [...query]) if (!value) query.delete(name, value);
    if (!query.has("by")) query.set("by", ""); // each run, and not the usual groups
    location.search = query;
  });
})();
