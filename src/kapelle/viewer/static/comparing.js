"use strict";
// The page that compares runs: a choice takes effect immediately, and the state of the curves (axis, zoom, log, hidden curves) is kept.
(() => {
  const form = document.getElementById("grouping");
  form?.addEventListener("change", () => {
    const query = new URLSearchParams(new FormData(form));
    const shown = new URLSearchParams(location.search);
    for (const name of ["x", "smooth", "q", "log", "zoom"]) if (shown.get(name)) query.set(name, shown.get(name));
    for (const name of ["off", "only"]) for (const key of shown.getAll(name)) query.append(name, key);
    for (const [name, value] of [...query]) if (!value) query.delete(name, value);
    if (!query.has("by")) query.set("by", ""); // draw each run instead of the default groups
    location.search = query;
  });
})();
