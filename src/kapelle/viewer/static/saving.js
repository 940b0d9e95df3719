"use strict";
// What a panel shows, as a file: its numbers as CSV, its picture as SVG (of lines and text) or PNG.
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

  // A label that a spreadsheet would take for a formula gets an apostrophe.
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
    // Where the chart on the page has a value, scaled to this picture.
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

  return async (form, what) => {
    if (form === "csv") given(what.title, form, [csv(what)], "text/csv");
    else if (form === "svg") given(what.title, form, [picture(what, svgPen)], "image/svg+xml");
    else given(what.title, form, await picture(what, (width, height) => canvasPen(width, height, 3)));
  };
})();
