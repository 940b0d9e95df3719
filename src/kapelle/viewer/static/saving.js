"use strict";
// Saves a panel or a table of shaded cells as a file: its numbers as CSV, its picture as SVG (shapes and text) or PNG.
const kapelleSave = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const WIDTH = 640, HEIGHT = 360, LEFT = 64, RIGHT = 16, TOP = 34, LINE = 18;

  const given = (name, form, parts, kind) => {
    const url = URL.createObjectURL(parts instanceof Blob ? parts : new Blob(parts, { type: kind }));
    const link = document.createElement("a");
    link.href = url;
    link.download = `${name.replace(/[^\p{L}\p{N}_-]+/gu, "_").slice(0, 80) || "curve"}.${form}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  };

  // A label that a spreadsheet would interpret as a formula gets an apostrophe.
  const cell = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  const csv = ({ chart, x }) => {
    const heads = [cell(x)];
    let label = "", ends = 0;
    chart.series.slice(1).forEach((series) => {
      if (series.line) { label = series.line.label || series.label || "value"; ends = 0; heads.push(cell(label)); }
      else heads.push(cell(`${label}, ${["lower", "upper"][ends++] || "more"}`));
    });
    const data = chart.series.slice(1).map((series, k) => series.own || chart.data[k + 1]);
    const rows = chart.data[0].map((at, n) => [at, ...data.map((column) => column[n] ?? "")].join(","));
    return [heads.join(","), ...rows].join("\n") + "\n";
  };

  // Two pens draw the same picture: one writes SVG, the other paints a canvas.
  const svgPen = (width, height) => {
    const root = document.createElementNS(NS, "svg");
    const put = (name, attributes, text) => {
      const element = document.createElementNS(NS, name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      if (text !== undefined) element.textContent = text;
      return element;
    };
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "sans-serif" })) root.setAttribute(key, value);
    const joined = (points) => points.map((at) => at.map((value) => value.toFixed(2)).join(",")).join(" ");
    let inside = root;
    const draw = (name, attributes, text) => inside.append(put(name, attributes, text));
    return {
      rect: (x, y, w, h, fill) => draw("rect", { x, y, width: w, height: h, fill }),
      text: (x, y, words, fill, { size = 11, anchor = "start", bold = false } = {}) => draw("text", { x, y, fill, "font-size": size, "text-anchor": anchor, "font-weight": bold ? 600 : 400 }, words),
      line: (points, stroke, width, dash = []) => draw("polyline", { points: joined(points), fill: "none", stroke, "stroke-width": width, "stroke-dasharray": dash.join(" ") || "none" }),
      area: (points, fill) => draw("polygon", { points: joined(points), fill, "fill-opacity": 0.16 }),
      within: (x, y, w, h, paint) => {
        const clip = put("clipPath", { id: "plot" });
        clip.append(put("rect", { x, y, width: w, height: h }));
        inside = put("g", { "clip-path": "url(#plot)" });
        root.append(clip, inside);
        paint();
        inside = root;
      },
      done: () => new XMLSerializer().serializeToString(root),
    };
  };
  const canvasPen = (width, height, scale) => {
    const canvas = document.createElement("canvas");
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const path = (points) => {
      pen.beginPath();
      points.forEach(([x, y], k) => (k ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    };
    return {
      rect: (x, y, w, h, fill) => { pen.fillStyle = fill; pen.fillRect(x, y, w, h); },
      text: (x, y, words, fill, { size = 11, anchor = "start", bold = false } = {}) => {
        pen.font = `${bold ? 600 : 400} ${size}px sans-serif`;
        pen.textAlign = { start: "left", middle: "center", end: "right" }[anchor];
        pen.fillStyle = fill;
        pen.fillText(words, x, y);
      },
      line: (points, stroke, width, dash = []) => { path(points); pen.strokeStyle = stroke; pen.lineWidth = width; pen.setLineDash(dash); pen.stroke(); },
      area: (points, fill) => { path(points); pen.closePath(); pen.fillStyle = fill; pen.globalAlpha = 0.16; pen.fill(); pen.globalAlpha = 1; },
      within: (x, y, w, h, paint) => { pen.save(); pen.beginPath(); pen.rect(x, y, w, h); pen.clip(); paint(); pen.restore(); },
      done: () => new Promise((resolve) => canvas.toBlob(resolve)),
    };
  };

  const picture = ({ chart, title, unit, x, paper, ink, colors }, penOf) => {
    const shown = chart.series.map((series, k) => [series, k]).filter(([series]) => series.line && series.show !== false);
    const bottom = TOP + HEIGHT, height = bottom + 48 + Math.ceil(shown.length / 2) * LINE, wide = WIDTH - LEFT - RIGHT;
    const pen = penOf(WIDTH, height);
    // The position of a value in the chart on the page, scaled to this picture.
    const across = (value) => LEFT + (chart.valToPos(value, "x", true) - chart.bbox.left) / chart.bbox.width * wide;
    const down = (value) => TOP + (chart.valToPos(value, "y", true) - chart.bbox.top) / chart.bbox.height * HEIGHT;
    const places = (k) => chart.data[0].map((at, n) => [at, chart.data[k][n]]).filter(([, value]) => value !== null && value !== undefined).map(([at, value]) => [across(at), down(value)]);
    const said = (axis) => (axis._splits || []).map((at, k) => [at, (axis._values || [])[k]]).filter(([, text]) => text !== null && text !== undefined && text !== "");
    pen.rect(0, 0, WIDTH, height, paper);
    pen.text(LEFT, 20, unit ? `${title} (${unit})` : title, ink, { size: 13, bold: true });
    for (const [at, text] of said(chart.axes[1])) {
      pen.line([[LEFT, down(at)], [WIDTH - RIGHT, down(at)]], colors.grid, 1);
      pen.text(LEFT - 6, down(at) + 4, text, colors.quiet, { anchor: "end" });
    }
    for (const [at, text] of said(chart.axes[0])) pen.text(across(at), bottom + 16, text, colors.quiet, { anchor: "middle" });
    pen.text(LEFT + wide / 2, bottom + 32, x === "step" ? "steps" : x, colors.quiet, { anchor: "middle" });
    pen.within(LEFT, TOP, wide, HEIGHT, () => {
      for (const [series, k] of shown) {
        const [low, high] = [chart.series[k + 1], chart.series[k + 2]];
        if (low && high && !low.line && !high.line) pen.area([...places(k + 1), ...places(k + 2).reverse()], colors.k[series.line.color]);
        pen.line(places(k), colors.k[series.line.color], 1.6, series.line.dash);
      }
    });
    shown.forEach(([series], place) => {
      const left = LEFT + (place % 2) * wide / 2, at = bottom + 54 + Math.floor(place / 2) * LINE;
      pen.line([[left, at - 4], [left + 22, at - 4]], colors.k[series.line.color], 1.6, series.line.dash);
      pen.text(left + 28, at, series.line.label || "team", ink);
    });
    return pen.done();
  };

  // `numbers` returns the CSV's rows, `paint` the picture that a pen of a given size draws.
  const write = async (form, title, numbers, paint) => {
    if (form === "csv") given(title, form, [numbers()], "text/csv");
    else if (form === "svg") given(title, form, [paint(svgPen)], "image/svg+xml");
    else given(title, form, await paint((width, height) => canvasPen(width, height, 3)));
  };
  const save = (form, what) => write(form, what.title, () => csv(what), (penOf) => picture(what, penOf));
  save.write = write;
  save.cell = cell;

  // The menu with the three formats.
  save.menu = (chosen) => {
    const menu = document.createElement("details"), summary = document.createElement("summary"), choice = document.createElement("div");
    menu.className = "save";
    summary.textContent = "save";
    for (const form of ["csv", "svg", "png"]) {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.form = form;
      button.textContent = form.toUpperCase();
      button.addEventListener("click", () => { menu.open = false; chosen(form); });
      choice.append(button);
    }
    menu.append(summary, choice);
    return menu;
  };

  // One colour over another, as an opaque colour that every program can read.
  const dot = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  save.over = (color, paper, share = 1) => {
    dot.globalAlpha = 1;
    dot.fillStyle = paper;
    dot.fillRect(0, 0, 1, 1);
    dot.globalAlpha = share;
    dot.fillStyle = color;
    dot.fillRect(0, 0, 1, 1);
    return `rgb(${[...dot.getImageData(0, 0, 1, 1).data].slice(0, 3).join(", ")})`;
  };
  save.paper = () => getComputedStyle(document.documentElement).backgroundColor;
  save.ink = () => getComputedStyle(document.body).color;

  // The text of a table of shaded cells, without columns that contain only drawings; a name that spans several rows is repeated in each.
  const words = (element) => (element?.textContent || "").replace(/\s+/g, " ").trim();
  const gridOf = (table) => {
    const rows = [...table.rows].map((row) => [...row.cells]);
    const columns = Math.max(...rows.map((row) => row.length));
    const told = Array.from({ length: columns }, (_, k) => k).filter((k) => rows.slice(1).some((row) => words(row[k])));
    return rows.map((row) => told.map((k) => row[k]));
  };
  // If cells have the count of which they are the share or the mean (`data-count`), a column with these counts is added.
  const tableNumbers = (table) => {
    const above = [], grid = gridOf(table);
    const counted = new Set(grid.flatMap((row) => row.map((each, k) => (each?.dataset.count === undefined ? -1 : k))));
    return grid.map((row, n) => row.flatMap((each, k) => {
      const named = each && k < 2 && each.dataset.value === undefined && n > 0;
      if (named && words(each)) above[k] = words(each);
      const value = each?.dataset.value ?? cell((named && k === 0 && above[k]) || (words(each) === "·" ? "" : words(each)));
      if (!counted.has(k)) return [value];
      return [value, n ? each?.dataset.count ?? "" : cell(`${words(each)}, ${each.dataset.counted}`)];
    }).join(",")).join("\n") + "\n";
  };
  const tablePicture = (table, title, penOf) => {
    const grid = gridOf(table), paper = save.paper(), ink = save.ink();
    dot.font = "11px sans-serif";
    const widths = grid[0].map((_, k) => Math.max(...grid.map((row) => dot.measureText(words(row[k])).width)) + 16);
    const starts = widths.map((_, k) => 12 + widths.slice(0, k).reduce((sum, each) => sum + each, 0));
    dot.font = "600 13px sans-serif";
    const wide = 24 + Math.ceil(Math.max(widths.reduce((sum, each) => sum + each, 0), dot.measureText(title).width)), height = 44 + 24 * grid.length;
    const pen = penOf(wide, height);
    pen.rect(0, 0, wide, height, paper);
    pen.text(12, 22, title, ink, { size: 13, bold: true });
    grid.forEach((row, n) => row.forEach((each, k) => {
      if (!each) return;
      const top = 34 + 24 * n, style = getComputedStyle(each), value = each.tagName === "TD" && each.matches("[data-value], .number");
      if (each.tagName === "TD") pen.rect(starts[k] + 1, top + 1, widths[k] - 2, 22, save.over(style.backgroundColor, paper));
      pen.text(value ? starts[k] + widths[k] - 8 : starts[k] + 8, top + 16, words(each), n ? save.over(style.color, paper) : ink, { anchor: value ? "end" : "start", bold: each.tagName === "TH" });
    }));
    return pen.done();
  };
  for (const table of document.querySelectorAll("table.heat, table.credit")) {
    const around = table.closest(".scroll") || table;
    let heading = around;
    while (heading && heading.tagName !== "H2") heading = heading.previousElementSibling;
    const title = words(heading) || "table";
    const menu = save.menu((form) => write(form, title, () => tableNumbers(table), (penOf) => tablePicture(table, title, penOf)));
    menu.classList.add("of-table");
    around.before(menu);
  }
  return save;
})();
