"use strict";
// Distributions over steps: each is a heat map with one column per stretch of steps; darker cells hold more values.
(() => {
  const place = document.getElementById("distributions");
  if (!place) return;
  const HEIGHT = 140, LEFT = 46, BELOW = 20;
  let page = null;
  const make = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = (value) => (value && Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)))).replace("-", "−");
  const share = (part, whole) => `${(100 * part / whole).toFixed(part && part / whole < 0.01 ? 2 : 0)} %`;
  const edge = (map, k) => (map.first + k) * 2 ** map.exponent;
  const span = (map, k) => map.exponent <= -20 ? short(edge(map, k)) : map.unit === "tokens" && map.exponent === 0 ? short(edge(map, k)) : `${short(edge(map, k))} to ${short(edge(map, k + 1))}`;
  const steps = (k) => page.width > 1 ? `steps ${k ? page.steps[k - 1] + 1 : page.steps[0] - page.width + 1} to ${page.steps[k]}` : `step ${page.steps[k]}`;

  const figureOf = (map) => {
    const figure = make("figure", "panel heat-map");
    figure.dataset.name = `distribution/${map.name}`;
    figure.id = `panel-distribution/${map.name}`;
    const caption = make("figcaption");
    const who = make("b", `k${map.color}`, map.who);
    caption.append(make("h3", "", map.title), who, make("span", "quiet", map.unit));
    const note = make("p", "note", map.meaning);
    note.hidden = true;
    const why = make("button", "why", "what is this");
    why.type = "button";
    why.setAttribute("aria-expanded", "false");
    why.addEventListener("click", () => { note.hidden = !note.hidden; why.setAttribute("aria-expanded", String(!note.hidden)); });
    const title = [map.title, map.who].filter(Boolean).join(" ");
    const now = () => page.maps.find((each) => each.name === map.name) || map;
    caption.append(why, kapelleSave.menu((form) => kapelleSave.write(form, title, () => numbers(now()), (penOf) => picture(now(), title, figure, penOf))));
    const canvas = make("canvas");
    canvas.setAttribute("role", "img");
    const said = make("p", "said quiet");
    figure.append(caption, make("p", "known quiet", map.known_as), note, canvas, said);
    return figure;
  };

  // Saved as a file: a row for each bin with values, or the map as it is drawn.
  const numbers = (map) => [
    '"step","from","to","values"',
    ...map.rows.flatMap((row, x) => row.map((count, y) => count && [page.steps[x], edge(map, y), edge(map, y + 1), count].join(",")).filter(Boolean)),
  ].join("\n") + "\n";
  const picture = (map, title, figure, penOf) => {
    const paper = kapelleSave.paper(), ink = getComputedStyle(figure.querySelector("figcaption b")).color, quiet = getComputedStyle(figure.querySelector(".said")).color;
    const columns = map.rows.length, bins = map.rows[0].length, wide = 560 / columns, tall = Math.min(240 / bins, 40), top = 34, floor = top + tall * bins;
    const pen = penOf(640, floor + 40), shades = new Map();
    const shade = (share) => {
      const part = Math.round(64 * (0.12 + 0.88 * Math.sqrt(share))) / 64;
      if (!shades.has(part)) shades.set(part, kapelleSave.over(ink, paper, part));
      return shades.get(part);
    };
    pen.rect(0, 0, 640, floor + 40, paper);
    pen.text(64, 20, map.unit ? `${title} (${map.unit})` : title, kapelleSave.ink(), { size: 13, bold: true });
    map.rows.forEach((row, x) => {
      const total = row.reduce((sum, n) => sum + n, 0);
      row.forEach((count, y) => count && pen.rect(64 + x * wide, floor - (y + 1) * tall, wide, tall, shade(count / total)));
    });
    for (const k of bins > 1 ? [0, Math.floor(bins / 2), bins] : [0]) pen.text(58, floor - k * tall + 4, short(edge(map, k)), quiet, { anchor: "end" });
    pen.text(64, floor + 16, String(page.steps[0]), quiet);
    if (columns > 1) pen.text(624, floor + 16, String(page.steps.at(-1)), quiet, { anchor: "end" });
    pen.text(344, floor + 32, "steps", quiet, { anchor: "middle" });
    return pen.done();
  };

  // The description of a column: its most frequent bin and the median of all values.
  const worded = (map, k) => {
    const row = map.rows[k], total = row.reduce((sum, n) => sum + n, 0);
    if (!total) return `${steps(k)}: none`;
    let below = 0;
    const middle = row.findIndex((n) => (below += n) >= total / 2), most = row.indexOf(Math.max(...row));
    return `${steps(k)}: ${total.toLocaleString("en")} values, median in ${span(map, middle)}, ${share(row[most], total)} in ${span(map, most)}`;
  };

  const draw = (map, figure) => {
    figure.querySelector(".known").textContent = map.known_as;
    const canvas = figure.querySelector("canvas"), said = figure.querySelector(".said");
    const width = Math.max(200, figure.clientWidth), density = devicePixelRatio || 1;
    canvas.width = width * density;
    canvas.height = (HEIGHT + BELOW) * density;
    const pen = canvas.getContext("2d");
    pen.scale(density, density);
    const ink = getComputedStyle(figure.querySelector("figcaption b")).color, quiet = getComputedStyle(said).color;
    const columns = map.rows.length, bins = map.rows[0].length;
    const wide = (width - LEFT) / columns, tall = Math.min(HEIGHT / bins, 24), floor = (HEIGHT + tall * bins) / 2; // if there are few bins, they do not fill the whole height
    map.rows.forEach((row, x) => {
      const total = row.reduce((sum, n) => sum + n, 0);
      row.forEach((count, y) => {
        if (!count) return;
        pen.globalAlpha = 0.12 + 0.88 * Math.sqrt(count / total); // the square root keeps rare values visible
        pen.fillStyle = ink;
        pen.fillRect(LEFT + x * wide, floor - (y + 1) * tall, Math.max(1, wide - (wide > 4 ? 1 : 0)), Math.max(1, tall - (tall > 4 ? 1 : 0)));
      });
    });
    pen.globalAlpha = 1;
    pen.fillStyle = quiet;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    for (const k of bins > 1 ? [0, Math.floor(bins / 2), bins] : [0]) pen.fillText(short(edge(map, k)), LEFT - 5, Math.min(HEIGHT, Math.max(9, floor - k * tall + 4)));
    pen.textAlign = "left";
    pen.fillText(page.steps[0], LEFT, HEIGHT + 14);
    pen.textAlign = "right";
    if (columns > 1) pen.fillText(`step ${page.steps.at(-1)}`, width, HEIGHT + 14);
    const rest = () => { said.textContent = worded(map, columns - 1); };
    rest();
    canvas.setAttribute("aria-label", `${map.title} ${map.who}: ${worded(map, columns - 1)}`);
    canvas.onpointermove = (event) => {
      const x = Math.floor((event.offsetX - LEFT) / wide), y = Math.floor((floor - event.offsetY) / tall);
      if (x < 0 || x >= columns || y < 0 || y >= bins) return rest();
      const total = map.rows[x].reduce((sum, n) => sum + n, 0);
      said.textContent = `${steps(x)}, ${span(map, y)}: ${total ? share(map.rows[x][y], total) : "0 %"} of ${total.toLocaleString("en")}`;
    };
    canvas.onpointerleave = rest;
  };

  // A distribution with the same value at all steps is shown as a line of text instead of a figure.
  const isConstant = (map) => map.rows.length > 1 && map.rows[0].length === 1 && span(map, 0) === short(edge(map, 0));
  const show = () => {
    place.hidden = !page.maps.length;
    if (place.hidden) return;
    const constant = page.maps.filter(isConstant), maps = page.maps.filter((map) => !isConstant(map));
    const shape = maps.map((map) => map.name).join();
    if (place.dataset.shape !== shape) {
      place.dataset.shape = shape;
      const grid = make("div", "panels");
      grid.append(...maps.map(figureOf));
      place.replaceChildren(make("h2", "", "How values are distributed"), grid);
      if (constant.length) place.append(make("p", "constants quiet", `constant: ${constant.map((map) => `${map.title} ${map.who} ${short(edge(map, 0))}`).join(" · ")}`));
    }
    const figures = [...place.querySelectorAll("figure")];
    maps.forEach((map, k) => draw(map, figures[k]));
    place.dataset.ready = "1";
  };
  let waiting = null, pause = 2000; // longer on a slow connection: at most a tenth of the time is spent on this
  const fetched = async () => {
    const began = Date.now();
    const answer = await fetch(`/run/${place.dataset.key}/distributions.json`).catch(() => null);
    if (answer?.ok) {
      page = await answer.json();
      show();
    }
    pause = Math.max(2000, 9 * (Date.now() - began));
    waiting = null;
  };
  document.addEventListener("rows", () => { waiting ??= setTimeout(fetched, pause); });
  document.addEventListener("theme", () => page && show());
  let size = innerWidth;
  addEventListener("resize", () => { if (page && Math.abs(innerWidth - size) > 8) { size = innerWidth; show(); } });
  fetched();
})();
