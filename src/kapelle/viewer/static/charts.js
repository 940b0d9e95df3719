"use strict";
// Curves: uPlot draws them, and they are fetched again when the server reports that a run has written.
(() => {
  const place = document.getElementById("charts");
  if (!place) return;
  const controls = document.getElementById("controls");
  const query = new URLSearchParams(location.search);
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [5, 2], [1, 2], [12, 4], [4, 1]];
  // Distances between ticks on an axis of steps, which must be whole numbers.
  const WHOLE = Array.from({ length: 12 }, (_, k) => [1, 2, 5].map((n) => n * 10 ** k)).flat();
  let page = null;
  let panels = [];
  const off = new Set(); // what the user has hidden in the legend: runs if several are drawn, otherwise agents
  const opened = new Set(); // panels that are shown although they are constant
  let zoom = null; // [from, to] on the horizontal axis; null shows everything

  const resolved = (name) => {
    const probe = document.createElement("span");
    probe.className = name;
    document.body.append(probe);
    const color = getComputedStyle(probe).color;
    probe.remove();
    return color;
  };
  const palette = () => ({ k: [0, 1, 2, 3, 4, 5, 6, 7].map((n) => resolved(`k${n}`)), quiet: resolved("quiet"), grid: resolved("gridline") });
  const faded = (color, share) => color.startsWith("rgb(") ? color.replace("rgb(", "rgba(").replace(")", `, ${share})`) : `color-mix(in srgb, ${color} ${share * 100}%, transparent)`;
  const settings = () => ({ x: controls.x.value, smooth: Number(controls.smooth.value), q: controls.q.value.trim().toLowerCase(), log: controls.log.checked });
  const make = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = (value, digits = 3) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    const text = size >= 1e4 || (size > 0 && size < 1e-3) ? value.toExponential(digits - 2) : String(Number(value.toPrecision(digits)));
    return text.replace("-", "−");
  };
  const seconds = (value) => value >= 7200 ? `${short(value / 3600)} h` : value >= 180 ? `${short(value / 60)} min` : `${short(value)} s`;
  const ticks = (axis) => (_, values) => values.map((value) => axis === "time" ? seconds(value) : value >= 1e6 ? `${short(value / 1e6)} M` : value >= 1e4 ? `${short(value / 1e3)} k` : short(value));

  // A running mean with bias correction at the start: the weights of the points so far are normalised.
  const smoothed = (values, share) => {
    if (!share) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = share * sum + value;
      weight = share * weight + 1;
      return sum / weight;
    });
  };
  const named = (series, many) => [series.who || (many || page.alone ? "" : "team"), many ? page.sources[series.source].label : ""].filter(Boolean).join(" · ");

  const keyOf = (line) => (page.sources.length > 1 && !page.alone ? `run ${page.sources[line.source].key} ${page.sources[line.source].label}` : line.who || line.label || "team");

  // A run has the same colour in every panel, and dashes distinguish its agents. From the eighth run on, other dashes distinguish runs with the same colour.
  const linesOf = (panel) => {
    const many = page.sources.length > 1 && !page.alone;
    const whose = [...new Set(panel.series.map((series) => series.who))];
    return panel.series.map((series) => {
      const place = whose.indexOf(series.who), round = many ? Math.floor(series.source / 7) : 0;
      return { ...series, color: many ? 1 + (series.source % 7) : series.color, dash: DASHES[(place + whose.length * round) % DASHES.length], label: named(series, many) };
    });
  };

  // The text of a panel whose curves have the same value at all steps and in every run; null for other panels.
  const constantOf = (panel) => {
    const values = new Map();
    let several = false;
    for (const { who, y } of panel.series) {
      for (const value of y) {
        if (value === null) continue;
        if (!values.has(who)) values.set(who, value);
        else several = true;
        if (Math.abs(value - values.get(who)) > rounding(value)) return null;
      }
    }
    if (values.size && !several || panel.name === "success" && page.sources.some((source) => source.evaluations.length)) return null;
    const texts = [...values.values()].map((value) => short(value));
    return new Set(texts).size < 2 ? texts[0] || "–" : [...values.keys()].map((who, k) => `${who || "team"} ${texts[k]}`).join(", ");
  };
  const rounding = (size) => Math.max(1e-9, 1e-6 * Math.abs(size)); // smaller differences are rounding errors
  // Constant panels are folded away, except those that the user has opened or searches for.
  const folded = () => {
    const { q } = settings(), found = new Map();
    for (const section of page.sections) for (const panel of section.panels) {
      const text = opened.has(panel.name) || (q && textOf(panel).includes(q)) ? null : constantOf(panel);
      if (text !== null) found.set(panel.name, [panel, text]);
    }
    return found;
  };
  const foldedLine = (away) => {
    const line = make("p", "constants quiet", "constant: ");
    for (const [name, [panel, text]] of away) {
      const button = make("button", "", panel.title);
      button.type = "button";
      button.addEventListener("click", () => open(name));
      line.append(button, ` ${text}`, name === [...away.keys()].at(-1) ? "" : " · ");
    }
    return line;
  };
  const open = (name) => {
    opened.add(name);
    draw();
    document.getElementById(`panel-${name}`).scrollIntoView();
  };
  const textOf = (panel) => `${panel.title} ${panel.name} ${panel.known_as || ""} ${(panel.series || []).map((series) => series.column).join(" ")}`.toLowerCase();

  const tableOf = (panel, lines, { x, smooth, log }) => {
    const tables = page.sources.map((source, k) => {
      const own = lines.filter((line) => line.source === k);
      const rows = own.flatMap((line) => (line.low ? [line.y, line.low, line.high] : [line.y]).map((values) => smoothed(values, smooth)));
      return [source.axes[x], ...rows];
    });
    if (panel.name === "success") {
      for (const source of page.sources) {
        if (source.evaluations.length) {
          tables.push([source.evaluations.map((e) => e.at[x]), ...["success", "low", "high"].map((name) => source.evaluations.map((e) => e[name]))]);
        }
      }
    }
    const kept = tables.filter((table) => table.length > 1);
    if (!kept.length) return [[]];
    const table = strict(uPlot.join(kept.map(distinct)));
    // 0 and negative values cannot be shown on a log scale.
    return log ? table.map((column, k) => (k ? column.map((value) => (value > 0 ? value : null)) : column)) : table;
  };
  // uPlot requires increasing x values: if several rows have the same x, the last one counts.
  const distinct = (table) => {
    const last = new Map(table[0].map((at, k) => [at, k]));
    const order = [...last.keys()].sort((a, b) => a - b).map((at) => last.get(at));
    return table.map((column) => order.map((k) => column[k]));
  };
  const strict = (table) => table.map((column) => [...column]);

  const seriesOf = (panel, lines, colors) => {
    const series = [{}];
    const bands = [];
    page.sources.forEach((source, k) => {
      for (const line of lines.filter((each) => each.source === k)) {
        const stroke = colors.k[line.color];
        const shown = !off.has(keyOf(line)), hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true, show: shown };
        series.push({ label: line.label, show: shown, stroke, width: 1.6, dash: line.dash, spanGaps: true, points: { show: page.sources[k].axes.step.length < 3 }, line });
        if (line.low) {
          series.push({ ...hidden }, { ...hidden });
          bands.push({ series: [series.length - 1, series.length - 2], fill: faded(stroke, 0.16) });
        }
      }
    });
    if (panel.name === "success") {
      page.sources.forEach((source, k) => {
        if (!source.evaluations.length) return;
        const color = page.sources.length > 1 ? 1 + (k % 7) : 0, stroke = colors.k[color];
        const label = page.sources.length > 1 ? `unseen · ${source.label}` : (lines.some((line) => line.low) ? "unseen problems" : "unseen problems, 95 %");
        const line = { color, dash: [2, 3], label, who: "unseen problems", source: k };
        const shown = !off.has(keyOf(line)), hidden = { stroke: "transparent", spanGaps: true, points: { show: false }, show: shown };
        series.push({ label, show: shown, stroke, width: 1.2, dash: [2, 3], spanGaps: true, points: { show: true, size: 6, fill: stroke }, line });
        series.push({ ...hidden }, { ...hidden });
        bands.push({ series: [series.length - 1, series.length - 2], fill: faded(stroke, 0.14) });
      });
    }
    return { series, bands };
  };

  // Add margins above and below; a curve that is flat, or flat except for rounding errors, gets a range with ticks.
  const range = (_, low, high) => {
    if (low === null || high === null) return [0, 1];
    if (low === 0 && high === 0) return [0, 1];
    const least = rounding(Math.max(Math.abs(low), Math.abs(high)));
    if (high - low < least) return [low - Math.max(least, Math.abs(low) * 0.1), high + Math.max(least, Math.abs(high) * 0.1)];
    const room = 0.08 * (high - low);
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  };
  const logRange = (_, low, high) => (low > 0 && high > 0 ? [low / 1.15, high * 1.15] : [0.1, 1]);
  const axesOf = (x, colors, extra = {}) => [
    { stroke: colors.quiet, grid: { show: false }, ticks: { stroke: colors.grid, size: 4, width: 1 }, font: "11px system-ui, sans-serif", values: ticks(x), space: 60, size: 26, ...(x === "step" ? { incrs: WHOLE } : {}) },
    { stroke: colors.quiet, grid: { stroke: colors.grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", values: (_, values) => {
      const written = (digits) => values.map((value) => (value === null ? "" : short(value, digits))), known = values.filter((value) => value !== null).length;
      return written([3, 4, 5, 6].find((digits) => new Set(written(digits).filter(Boolean)).size === known) || 6); // the number of digits that is needed to distinguish the ticks
    }, size: (_, values) => Math.max(46, 14 + 6.5 * Math.max(0, ...(values || []).map((text) => text.length))), ...extra },
  ];

  const legendOf = (figure, series) => {
    const list = figure.querySelector(".legend");
    list.replaceChildren();
    const outputs = [];
    series.forEach((each, k) => {
      if (!each.line) return;
      const item = make("li"), button = make("button");
      button.type = "button";
      button.title = "click to hide or show this curve; double-click to show only this curve";
      button.setAttribute("aria-pressed", String(each.show !== false));
      if (each.line.who !== undefined || each.line.source !== undefined) {
        button.dataset.key = keyOf(each.line);
        button.addEventListener("click", () => turn(button.dataset.key));
        button.addEventListener("dblclick", () => alone(button.dataset.key));
      } else button.disabled = true;
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.setAttribute("viewBox", "0 0 22 6");
      svg.setAttribute("class", `k${each.line.color}`);
      svg.setAttribute("aria-hidden", "true");
      const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
      Object.entries({ x1: 0, x2: 22, y1: 3, y2: 3, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": (each.line.dash || []).join(" ") }).forEach(([name, value]) => stroke.setAttribute(name, value));
      svg.append(stroke);
      const value = make("b");
      button.append(svg, document.createTextNode(each.line.label || ""), value);
      item.append(button);
      list.append(item);
      outputs.push([k, value]);
    });
    return outputs;
  };
  // A curve is shown or hidden in every panel.
  const shift = () => {
    for (const { chart, figure } of panels) {
      let shown = true;
      chart.batch(() => chart.series.forEach((each, k) => {
        if (!k || each.own) return;
        if (each.line) shown = !off.has(keyOf(each.line));
        if (each.show !== shown) chart.setSeries(k, { show: shown });
      }));
      for (const button of figure.querySelectorAll(".legend button[data-key]")) button.setAttribute("aria-pressed", String(!off.has(button.dataset.key)));
    }
  };
  const everyKey = () => new Set([...place.querySelectorAll(".legend button[data-key]")].map((button) => button.dataset.key));
  const turn = (key) => { if (!off.delete(key)) off.add(key); keep(); shift(); };
  const alone = (key) => {
    const keys = everyKey();
    keys.delete(key);
    const already = !off.has(key) && [...keys].every((each) => off.has(each));
    off.clear();
    if (!already) keys.forEach((each) => off.add(each));
    keep();
    shift();
  };
  // Dragging in a panel zooms all panels; a double click or the button shows everything again. The keys do the same in the panel that has the focus.
  const zoomed = (chart) => {
    if (zoom) chart.setScale("x", { min: zoom[0], max: zoom[1] });
  };
  const spoken = ({ figure, panel }) => {
    const { x } = settings();
    const axis = x === "step" ? "steps" : x, range = zoom ? `${axis} ${short(zoom[0])} to ${short(zoom[1])}` : `all ${axis}`;
    figure.querySelector(".plot").setAttribute("aria-label", `${panel.title}, ${range}. Plus and minus zoom, left and right arrow move, 0 shows all.`);
  };
  const magnifyByKey = (event, chart) => {
    const all = chart.data[0];
    const action = { "+": "in", "=": "in", "-": "out", "\u2212": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" }[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey || all.length < 2) return;
    event.preventDefault();
    const first = all[0], last = all.at(-1), whole = last - first, least = settings().x === "step" ? 2 : whole / 5000;
    const [from, to] = zoom || [first, last];
    if (action === "all") return magnify(null);
    const wide = action === "in" ? Math.max((to - from) / 2, Math.min(to - from, least)) : action === "out" ? 2 * (to - from) : to - from;
    if (wide >= whole) return magnify(null);
    const middle = (from + to) / 2 + { left: -wide / 4, right: wide / 4 }[action] || (from + to) / 2;
    const start = Math.min(Math.max(middle - wide / 2, first), last - wide);
    magnify([start, start + wide]);
  };
  const magnify = (found) => {
    zoom = found;
    const reset = controls.querySelector("[name=reset]");
    reset.hidden = !zoom;
    keep();
    for (const each of panels) {
      zoom ? zoomed(each.chart) : each.chart.setData(each.chart.data);
      spoken(each);
    }
  };
  const dragging = {
    cursor: { drag: { x: true, y: false, setScale: false, dist: 6 }, bind: { dblclick: () => () => { magnify(null); return null; } } },
    setSelect: (chart) => {
      const { left, width } = chart.select;
      if (width < 6) return;
      const ends = [chart.posToVal(left, "x"), chart.posToVal(left + width, "x")];
      chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      magnify(ends);
    },
  };
  const tell = (chart, outputs) => {
    const at = chart.cursor.idx;
    for (const [k, output] of outputs) {
      const column = chart.data[k] || [];
      let value = at === null || at === undefined ? null : column[at];
      for (let n = column.length - 1; (at === null || at === undefined) && (value === null || value === undefined) && n >= 0; n--) value = column[n];
      output.textContent = short(value);
    }
  };

  const figureOf = (panel) => {
    const figure = make("figure", "panel");
    figure.dataset.name = panel.name;
    figure.id = `panel-${panel.name}`;
    const caption = make("figcaption");
    const title = make("h3"), link = make("a", "", panel.title);
    link.href = `#panel-${panel.name}`; // a link to this curve, which users can share
    title.append(link);
    caption.append(title, make("span", "quiet", panel.unit));
    const save = kapelleSave.menu((form) => {
      const { chart } = panels.find((each) => each.figure === figure);
      kapelleSave(form, { chart, title: panel.title, unit: panel.unit, x: settings().x, paper: kapelleSave.paper(), ink: kapelleSave.ink(), colors: palette() });
    });
    const note = make("p", "note", [panel.meaning, panel.warning && `Watch for: ${panel.warning}`].filter(Boolean).join(" "));
    note.hidden = true;
    if (note.textContent) {
      const why = make("button", "why", "what is this");
      why.type = "button";
      why.setAttribute("aria-expanded", "false");
      why.addEventListener("click", () => { note.hidden = !note.hidden; why.setAttribute("aria-expanded", String(!note.hidden)); });
      caption.append(why);
    }
    caption.append(save);
    const plot = make("div", "plot");
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-roledescription", "chart");
    plot.title = "drag, or + − ← → 0 to zoom";
    plot.addEventListener("keydown", (event) => magnifyByKey(event, panels.find((each) => each.figure === figure).chart));
    figure.append(caption, make("p", "known quiet", (panel.known_as || "").replaceAll("`", "")), note, plot, make("ul", "legend"));
    return figure;
  };

  const drawn = (panel, figure, colors) => {
    const at = settings();
    const lines = linesOf(panel);
    const { series, bands } = seriesOf(panel, lines, colors);
    const data = tableOf(panel, lines, at);
    const plot = figure.querySelector(".plot");
    plot.replaceChildren();
    let outputs = [];
    const chart = new uPlot({
      width: Math.max(200, plot.clientWidth), height: 170, series, bands, legend: { show: false },
      scales: { x: { time: false }, y: at.log ? { distr: 3, log: 10, range: logRange } : { range } }, axes: axesOf(at.x, colors),
      cursor: { sync: { key: "kapelle", filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } }, points: { size: 5 }, y: false, ...dragging.cursor },
      hooks: { setCursor: [(u) => tell(u, outputs)], setData: [(u) => tell(u, outputs)], setSelect: [dragging.setSelect] },
    }, data, plot);
    zoomed(chart);
    outputs = legendOf(figure, series);
    tell(chart, outputs);
    return { panel, figure, chart };
  };

  const timeDrawn = (times, source, figure, colors) => {
    const { x } = settings();
    const plot = figure.querySelector(".plot");
    plot.replaceChildren();
    const series = [{}], bands = [];
    const order = [...times.bands].reverse();
    order.forEach((band, k) => {
      const number = times.bands.length - 1 - k;
      const color = (number % 7) + 1;
      const last = k === order.length - 1;
      series.push({ stroke: colors.k[color], width: 1, spanGaps: true, points: { show: false }, fill: last ? faded(colors.k[color], 0.4) : undefined, line: { color, dash: [], label: band.name }, own: band.own });
      if (!last) bands.push({ series: [k + 1, k + 2], fill: faded(colors.k[color], 0.4) });
    });
    let outputs = [];
    const data = distinct([source.axes[x], ...order.map((band) => band.top)]);
    const own = distinct([source.axes[x], ...order.map((band) => band.own)]);
    const say = (u) => {
      const at = u.cursor.idx ?? own[0].length - 1;
      for (const [k, output] of outputs) output.textContent = own[k][at] === undefined ? "–" : `${short(own[k][at])} s`;
    };
    const chart = new uPlot({
      width: Math.max(200, plot.clientWidth), height: 170, series, bands, legend: { show: false }, scales: { x: { time: false }, y: { range: (_, low, high) => [0, high || 1] } },
      axes: axesOf(x, colors), cursor: { sync: { key: "kapelle", filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } }, points: { show: false }, y: false, ...dragging.cursor }, hooks: { setCursor: [say], setSelect: [dragging.setSelect] },
    }, data, plot);
    zoomed(chart);
    outputs = legendOf(figure, series);
    say(chart);
    return { panel: { name: "time", title: "where a step's time goes" }, figure, chart };
  };

  const shapeOf = (away) => JSON.stringify([page.sections.map((s) => [s.title, s.panels.map((p) => p.name)]), page.times.map((t) => t.bands.length), [...away].map(([name, [, text]]) => [name, text])]);
  const draw = () => {
    const colors = palette(), away = folded();
    const shape = shapeOf(away);
    if (shape === place.dataset.shape) { // the figures are the same, so selections and unfolded parts in them are kept
      panels = panels.map((each) => {
        each.chart.destroy();
        const [section, k] = each.from;
        const made = section < 0 ? timeDrawn(page.times[k], page.sources[k], each.figure, colors) : drawn(page.sections[section].panels[k], each.figure, colors);
        return { ...each, ...made };
      });
      return sift();
    }
    place.dataset.shape = shape;
    const told = new Set(panels.filter((each) => !each.figure.querySelector(".note").hidden).map((each) => each.panel.name));
    place.style.minHeight = `${place.offsetHeight}px`; // otherwise the page would be shorter for a moment and scroll up
    place.replaceChildren();
    panels.forEach((each) => each.chart.destroy());
    panels = [];
    if (!page.sections.length) place.append(make("p", "quiet", "ended" in place.dataset ? "This run has no steps, so there are no curves." : "No step has been recorded yet. Curves appear after the first step."));
    for (const [at, section] of page.sections.entries()) {
      const grid = make("div", "panels");
      const heading = make("h2", "", section.title);
      place.append(heading, grid);
      for (const [k, panel] of section.panels.entries()) {
        if (away.has(panel.name)) continue;
        const figure = figureOf(panel);
        grid.append(figure);
        panels.push({ ...drawn(panel, figure, colors), heading, grid, from: [at, k] });
      }
      if (section.title === "Pace") {
        page.times.forEach((times, k) => {
          if (!times.bands.length || k > 3) return;
          const title = page.sources.length > 1 ? `where a step's time goes · ${page.sources[k].label}` : "where a step's time goes";
          const figure = figureOf({ name: "time", title, unit: "seconds, stacked", known_as: "step time by activity", meaning: "Every moment of a step counts once; the parts add up to the whole step.", warning: "" });
          grid.append(figure);
          panels.push({ ...timeDrawn(times, page.sources[k], figure, colors), heading, grid, from: [-1, k] });
        });
      }
      if (!grid.children.length) { heading.remove(); grid.remove(); }
    }
    if (away.size) place.append(foldedLine(away));
    for (const each of panels) if (told.has(each.panel.name)) each.figure.querySelector(".why")?.click();
    sift();
    place.style.minHeight = "";
  };

  const sift = () => {
    const { q } = settings();
    const shown = new Set();
    for (const each of panels) {
      spoken(each);
      each.figure.hidden = Boolean(q) && !textOf(each.panel).includes(q);
      if (!each.figure.hidden) shown.add(each.grid);
    }
    for (const each of panels) {
      each.heading.hidden = !shown.has(each.grid);
      each.grid.hidden = !shown.has(each.grid);
    }
  };

  const keep = () => {
    const kept = new URLSearchParams(location.search);
    const { x, smooth, q, log } = settings();
    const ends = zoom ? zoom.map((at) => Number(at.toPrecision(6))).join("_") : "";
    for (const [name, value] of [["x", x === "step" ? "" : x], ["smooth", smooth || ""], ["q", q], ["log", log ? "1" : ""], ["zoom", ends]]) value ? kept.set(name, value) : kept.delete(name);
    // What is hidden or, if most curves are hidden, what is shown.
    const shown = [...everyKey()].filter((key) => !off.has(key)), few = off.size > shown.length && shown.length > 0;
    kept.delete("off");
    kept.delete("only");
    for (const key of few ? shown : off) kept.append(few ? "only" : "off", key);
    history.replaceState(null, "", kept.size ? `?${kept}` : location.pathname);
  };

  const fetched = async () => {
    if (page?.embedded) return;
    const text = await (await fetch(place.dataset.from || `/curves.json?${place.dataset.curves || place.dataset.runs}`)).json();
    page = text;
    draw();
    pick();
  };

  // Hide what the URL lists, once it is known which curves exist.
  let only = query.getAll("only");
  const pick = () => {
    const keys = [...everyKey()];
    if (keys.some((key) => only.includes(key))) keys.forEach((key) => only.includes(key) || off.add(key));
    if (only.length) shift();
    only = [];
  };

  // The information about the run itself: only the parts that have changed are replaced.
  const renew = async () => {
    const about = document.getElementById("about");
    if (!about || !place.dataset.key) return;
    const answer = await fetch(`/run/${place.dataset.key}`).catch(() => null);
    if (!answer?.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const parts = [...fresh.getElementById("about").children];
    if (parts.length !== about.children.length) about.replaceChildren(...parts);
    else [...about.children].forEach((old, k) => old.isEqualNode(parts[k]) || old.replaceWith(parts[k]));
    document.querySelector("[data-state]").replaceChildren(...fresh.querySelector("[data-state]").childNodes);
    if ("ended" in fresh.getElementById("charts").dataset) place.dataset.ended = "";
  };
  // A run may write faster than curves can be fetched and drawn; at most a fifth of the time is spent on this.
  let loading = null, next = 0;
  const reload = () => {
    if (loading) { loading.again = true; return; }
    const begins = Math.max(Date.now(), next), own = { again: false };
    loading = own;
    setTimeout(async () => {
      const began = Date.now();
      own.again = false; // the responses contain everything that has changed until now
      await Promise.all([fetched(), renew()]).catch(() => {});
      document.documentElement.dataset.step = Math.max(0, ...page.sources.map((source) => source.axes.step.at(-1) ?? 0));
      document.dispatchEvent(new Event("rows"));
      loading = null;
      next = Date.now() + Math.max(250, 4 * (Date.now() - began));
      if (own.again) reload();
    }, begins - Date.now());
  };
  const listen = () => {
    const from = page.sources.map((source) => source.rows).join(",");
    const grouped = "grouped" in place.dataset || page.alone;
    const news = new EventSource(`/events?${place.dataset.runs}${grouped ? "" : `&from=${from}`}`);
    const live = document.getElementById("live");
    let lost = false;
    news.addEventListener("open", () => { live.textContent = ""; if (lost) reload(); lost = false; });
    news.addEventListener("error", () => { live.textContent = "not connected"; lost = true; });
    news.addEventListener("changed", reload);
    addEventListener("pagehide", () => news.close());
  };

  // A link may refer to a panel that did not exist yet when the page was loaded.
  const reach = () => {
    if (!location.hash.startsWith("#panel-")) return;
    const id = decodeURIComponent(location.hash.slice(1)), name = id.slice("panel-".length);
    if (folded().has(name)) open(name);
    else document.getElementById(id)?.scrollIntoView();
  };
  addEventListener("hashchange", () => page && reach());
  controls.x.value = query.get("x") || "step";
  if (!controls.x.value) controls.x.value = "step";
  controls.smooth.value = query.get("smooth") || "0";
  controls.q.value = query.get("q") || "";
  controls.log.checked = query.get("log") === "1";
  const ends = (query.get("zoom") || "").split("_").map(Number);
  if (ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1]) zoom = ends;
  query.getAll("off").forEach((key) => off.add(key));
  controls.reset.hidden = !zoom;
  controls.reset.addEventListener("click", () => magnify(null));
  const say = () => { controls.querySelector("output").textContent = controls.smooth.value; };
  say();
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("input", (event) => {
    say();
    if (event.target.name === "x") { zoom = null; controls.reset.hidden = true; } // a zoom in steps is not valid in seconds
    keep();
    if (event.target.name === "q" && shapeOf(folded()) === place.dataset.shape) sift();
    else draw();
  });
  document.addEventListener("theme", () => page && draw());
  let width = innerWidth;
  addEventListener("resize", () => {
    if (page && Math.abs(innerWidth - width) > 8) { width = innerWidth; draw(); }
  });
  const embedded = document.getElementById("embedded-curves");
  if (embedded) {
    page = { ...JSON.parse(embedded.textContent), embedded: true };
    draw();
    pick();
    reach();
    document.documentElement.dataset.ready = "1";
  } else {
    fetched().then(() => { reach(); document.documentElement.dataset.ready = "1"; listen(); });
  }
})();
