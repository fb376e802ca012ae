"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);

  // Numbers ----------------------------------------------------------------
  const three = (x) => (x === 0 || Math.abs(x) >= 100 ? x.toFixed(0) : Math.abs(x) < 10 ? x.toFixed(2) : x.toFixed(1));
  const small = (x) => (x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(1) : Math.abs(x) < 1 ? x.toPrecision(3) : three(x));
  const seconds = (x) => (x >= 1 ? `${three(x)} s` : x >= 1e-3 ? `${three(x * 1e3)} ms` : x >= 1e-6 ? `${three(x * 1e6)} µs` : `${three(x * 1e9)} ns`);
  const known = (x) => x !== null && x !== undefined && Number.isFinite(x);
  const show = (x, text) => (known(x) ? text(x) : "");
  /** A CPU's rates are read in GFLOP/s. */
  const rates = data.cases.flatMap((c) => c.runs.filter((r) => known(r.time)).map((r) => c.flops / r.time));
  const FLOPS = rates.some((rate) => rate >= 1e12) ? { unit: 1e12, label: "TFLOP/s" } : { unit: 1e9, label: "GFLOP/s" };
  const METRICS = {
    time: { label: "Time", axis: "time, logarithmic; further left is faster", log: true, text: seconds, of: (c, r, t) => t },
    flops: { label: FLOPS.label, axis: `${FLOPS.label}; further right is faster`, text: small, of: (c, r, t) => c.flops / t / FLOPS.unit },
    gbs: { label: "GB/s", axis: "GB/s; further right is faster", text: small, of: (c, r, t) => c.bytes / t / 1e9 },
    fraction: { label: "Fraction of limit", axis: "limit / time; 1 is the limit that was measured on this device", text: small, of: (c, r, t) => c.limit_s / t },
    ratio: { label: "Ratio to ours", axis: "time / ours, logarithmic; right of 1 is slower than ours", log: true, text: (x) => `${three(x)}×`, of: (c, r, t) => (known(r.ratio) ? (r.ratio * t) / r.time : null) },
  };
  const value = (metric, c, r, t = r.time) => (known(t) ? METRICS[metric].of(c, r, t) : null);
  const quartiles = (metric, c, r) => [r.low, r.high].map((t) => value(metric, c, r, t));

  // What is shown ----------------------------------------------------------
  const state = { metric: "time", operation: "", phase: "", dtype: "", losses: false, hidden: new Set(), sort: "operation", down: false };
  const number = new Map(data.runs.map((run, index) => [run.name, index]));
  const bad = (c) => c.standing === "loss" || c.standing === "missing";
  const visible = () => data.cases.filter((c) => ["operation", "phase", "dtype"].every((f) => !state[f] || c[f] === state[f]) && (!state.losses || bad(c)));
  const shownRuns = (c) => c.runs.filter((r) => !state.hidden.has(r.name));

  // Elements: everything from the data goes in as text, never as markup -----
  const SVG = "http://www.w3.org/2000/svg";
  const fill = (node, attributes, children) => {
    for (const [name, content] of Object.entries(attributes)) if (content !== null && content !== false) node.setAttribute(name, content);
    node.append(...children.flat().filter((child) => child !== null));
    return node;
  };
  const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

  const SHAPES = [
    (x, y, s) => `M${x - s},${y}a${s},${s} 0 1,0 ${2 * s},0a${s},${s} 0 1,0 ${-2 * s},0`,
    (x, y, s) => `M${x - s},${y - s}h${2 * s}v${2 * s}h${-2 * s}z`,
    (x, y, s) => `M${x},${y - 1.25 * s}L${x + 1.2 * s},${y + s}H${x - 1.2 * s}z`,
    (x, y, s) => `M${x},${y - 1.35 * s}L${x + 1.35 * s},${y}L${x},${y + 1.35 * s}L${x - 1.35 * s},${y}z`,
    (x, y, s) => `M${x - 1.2 * s},${y - s}H${x + 1.2 * s}L${x},${y + 1.25 * s}z`,
  ];
  const colour = (name) => `var(--run-${number.get(name) % 12})`;
  const ours = (name) => data.runs[number.get(name)].kind === "ours";
  const peers = data.runs.filter((run) => run.kind === "peer").map((run) => run.name);
  /** Ours are round, filled where dispatch chooses them; peers have corners. Colour is never the only difference. */
  function shape(name, x, y, hollow) {
    const mine = ours(name);
    const draw = mine ? SHAPES[0] : SHAPES[1 + (peers.indexOf(name) % 4)];
    return svg("path", { d: draw(x, y, mine ? 6 : 4.5), fill: hollow ? "var(--page)" : colour(name), stroke: hollow ? colour(name) : "var(--page)", "stroke-width": hollow ? 2 : 1.5 });
  }

  // Controls ---------------------------------------------------------------
  function controls() {
    for (const [name, metric] of Object.entries(METRICS)) {
      const input = el("input", { type: "radio", name: "metric", value: name, id: `metric-${name}` });
      input.checked = name === state.metric;
      input.addEventListener("change", () => { state.metric = name; render(); });
      $("metric").append(el("label", {}, input, metric.label));
    }
    for (const field of ["operation", "phase", "dtype"]) {
      const values = [...new Set(data.cases.map((c) => c[field]))];
      if (field === "operation") values.sort();
      $(field).append(el("option", { value: "" }, "all"), ...values.map((v) => el("option", { value: v }, v)));
      $(field).addEventListener("change", (event) => { state[field] = event.target.value; render(); });
    }
    $("losses").addEventListener("change", (event) => { state.losses = event.target.checked; render(); });
    for (const run of data.runs) {
      const button = el("button", { type: "button", "aria-pressed": "true", "data-run": run.name },
        svg("svg", { width: 16, height: 16, "aria-hidden": "true" }, shape(run.name, 8, 8, false)), `${run.name}${run.kind === "ours" ? " (ours)" : ""}`);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(run.name)) state.hidden.add(run.name);
        button.setAttribute("aria-pressed", String(!state.hidden.has(run.name)));
        render();
      });
      $("legend").append(button);
    }
  }

  const some = (number, one, several) => `${number} ${number === 1 ? one : several}`;
  function summary() {
    const count = (word) => data.cases.filter((c) => c.standing === word).length;
    const ratios = data.cases.filter((c) => known(c.ratio)).map((c) => Math.log(c.ratio));
    const parts = [el("b", {}, some(data.cases.length, "case", "cases")), ": ", `${count("win")} faster than the best peer, ${count("even")} even, `, el("b", { class: count("loss") ? "loss" : null }, some(count("loss"), "loss", "losses"))];
    if (count("alone")) parts.push(`, ${count("alone")} without a peer`);
    if (count("missing")) parts.push(", ", el("b", { class: "loss" }, `${count("missing")} without a result of ours`));
    if (ratios.length) parts.push(`. Geometric mean of best peer / ours: ${three(Math.exp(ratios.reduce((a, b) => a + b, 0) / ratios.length))}×`);
    $("summary").append(...parts);
    for (const [label, text] of data.provenance) $("provenance").append(el("dt", {}, label), el("dd", {}, text));
  }

  // Charts -----------------------------------------------------------------
  function scale(metric, values, left, right) {
    const log = METRICS[metric].log;
    let low = Math.min(...values), high = Math.max(...values);
    if (metric === "ratio" || metric === "fraction") high = Math.max(high, 1);
    if (metric === "ratio") low = Math.min(low, 1);
    const ticks = [];
    if (log) {
      const pad = Math.max(0.05 * Math.log(high / low), 0.08);
      [low, high] = [Math.log(low) - pad, Math.log(high) + pad];
      const steps = high - low > 7 ? [1] : high - low > 3 ? [1, 3] : [1, 2, 5];
      const fine = high - low < 1.5 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : steps;
      for (let e = Math.floor(low / Math.LN10) - 1; e <= high / Math.LN10 + 1; e++) for (const s of fine) ticks.push(s * 10 ** e);
      const at = (v) => left + ((Math.log(v) - low) / (high - low)) * (right - left);
      return { at, ticks: ticks.filter((v) => Math.log(v) >= low && Math.log(v) <= high) };
    }
    high = high || 1; // an operation that only moves data has no products
    const rough = (high * 1.04) / Math.max(2, Math.min(6, (right - left) / 90)), unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((s) => s * unit >= rough) * unit;
    for (let index = 0; index * step <= high * 1.04; index++) ticks.push(index * step);
    return { at: (v) => left + (v / (high * 1.04)) * (right - left), ticks };
  }
  const TICK = 11.5; // the size of their labels
  /** Tick labels that would touch their neighbour are left out. */
  function apart(ticks, at, text) {
    const kept = [];
    for (const tick of ticks) if (!kept.length || at(tick) - at(kept[kept.length - 1]) > 10 + widthOf(text(tick), TICK)) kept.push(tick);
    return kept;
  }
  const tickText = (metric) => (v) => {
    if (metric === "time") { const [n, unit] = seconds(v * 1.0000001).split(" "); return `${+n} ${unit}`; }
    return `${+v.toPrecision(3)}${metric === "ratio" ? "×" : ""}`;
  };

  function standingText(c) {
    if (c.standing === "missing") return "no result of ours";
    if (!known(c.ratio)) return "";
    return c.standing === "loss" ? `loss ${three(c.ratio)}×` : c.standing === "even" ? `even ${three(c.ratio)}×` : `${three(c.ratio)}×`;
  }
  const ruler = document.createElement("canvas").getContext("2d");
  /** Of a text in a chart, in pixels. */
  function widthOf(text, size = 12.5) {
    ruler.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
    return ruler.measureText(text).width;
  }
  function shorten(text, room) {
    let kept = text;
    while (kept.length > 1 && widthOf(kept) > room) kept = `${kept.slice(0, -2)}…`;
    return kept;
  }

  function chart(operation, cases, width) {
    const metric = state.metric, narrow = width < 640;
    const several = (field) => new Set(data.cases.map((c) => c[field])).size > 1;
    const kind = (c) => [several("dtype") && c.dtype, several("phase") && c.phase].filter(Boolean).join(" ");
    const label = (c) => `${c.case} ${kind(c)}`.trim();
    const left = narrow ? 6 : Math.min(0.36 * width, 20 + Math.max(...cases.map((c) => widthOf(label(c)))));
    const right = width - (narrow ? 10 : 96), room = narrow ? right - 86 : left - 10, top = 24;
    const folded = narrow && cases.some((c) => widthOf(label(c)) > room), row = folded ? 59 : narrow ? 44 : 27;
    const points = cases.flatMap((c) => shownRuns(c).filter((r) => known(value(metric, c, r))).map((r) => ({ c, r, v: value(metric, c, r) })));
    const height = top + row * cases.length + 6;
    const figure = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${operation}: ${METRICS[metric].label} of ${cases.length} cases` });
    if (!points.length) return el("p", { class: "hint" }, "Nothing that is shown has a number here.");
    const values = points.flatMap(({ c, r, v }) => [v, ...quartiles(metric, c, r)]);
    if (metric === "time") values.push(...cases.map((c) => c.limit_s).filter((v) => known(v) && v > 0));
    const { at, ticks } = scale(metric, values, left + 8, right);
    const text = tickText(metric);
    for (const tick of apart(ticks, at, text)) {
      const half = widthOf(text(tick), TICK) / 2; // a label at the edge moves inwards
      figure.append(svg("line", { class: "grid", x1: at(tick), x2: at(tick), y1: top - 5, y2: height }),
        svg("text", { class: "tick", x: Math.max(half, Math.min(at(tick), width - half)), y: top - 10, "text-anchor": "middle" }, text(tick)));
    }
    if (metric === "ratio" || metric === "fraction") figure.append(svg("line", { class: "one", x1: at(1), x2: at(1), y1: top - 5, y2: height }));
    cases.forEach((c, index) => {
      const y = top + row * index + (narrow ? row - 14 : row / 2), says = standingText(c), line = narrow ? top + row * index + 14 : y + 4;
      const short = shorten(c.case, folded ? room : room - widthOf(` ${kind(c)}`)); // of the kind nothing is left out
      const words = svg("text", { x: narrow ? 6 : left - 8, y: line, "text-anchor": narrow ? "start" : "end" },
        folded ? short : `${short} ${kind(c)}`, folded ? svg("tspan", { x: 6, dy: 15 }, kind(c)) : null);
      words.append(svg("title", {}, `${label(c)}: ${c.call}`));
      figure.append(words, svg("text", { class: bad(c) ? "loss" : "minor", x: width - 4, y: line, "text-anchor": "end" }, says));
      const here = points.filter((p) => p.c === c).sort((a, b) => a.v - b.v);
      if (metric === "time" && known(c.limit_s) && c.limit_s > 0) figure.append(svg("line", { class: "limit", x1: at(c.limit_s), x2: at(c.limit_s), y1: y - 7, y2: y + 7 }, svg("title", {}, `limit ${seconds(c.limit_s)}`)));
      const mine = here.find((p) => p.r.kind === "ours" && p.r.speaks), rival = here.filter((p) => p.r.kind === "peer").sort((a, b) => a.r.time - b.r.time)[0];
      if (mine && rival) figure.append(svg("line", { class: c.standing === "loss" ? "bridge is-loss" : "bridge", x1: at(mine.v), x2: at(rival.v), y1: y, y2: y }));
      // ours last, so that it lies on top; tabbing goes by value
      for (const p of [...here].sort((a, b) => (a === mine) - (b === mine))) figure.append(mark(p, at, y, index, here.indexOf(p), metric));
    });
    const first = figure.querySelector('[data-row="0"][data-place="0"]') ?? figure.querySelector(".mark");
    first.setAttribute("tabindex", "0");
    figure.addEventListener("keydown", move);
    return figure;
  }

  function mark(p, at, y, row, place, metric) {
    const { c, r, v } = p, x = at(v);
    const [low, high] = quartiles(metric, c, r).map(at);
    const node = svg("g", { class: "mark", role: "img", tabindex: "-1", "data-row": row, "data-place": place, "data-run": r.name, "aria-label": `${r.name}, ${c.operation} ${c.case} ${c.dtype} ${c.phase}: ${METRICS[metric].text(v)}${r.speaks ? `, ${standingText(c)}` : ""}` },
      svg("line", { x1: low, x2: high, y1: y, y2: y, stroke: colour(r.name), "stroke-width": 1.5 }),
      shape(r.name, x, y, r.kind === "ours" && !r.speaks), svg("circle", { class: "ring", cx: x, cy: y, r: 10 }));
    node.addEventListener("pointerenter", () => tip(node, c, r));
    node.addEventListener("focus", () => tip(node, c, r));
    node.addEventListener("click", () => tip(node, c, r));
    for (const event of ["pointerleave", "blur"]) node.addEventListener(event, () => { $("tip").hidden = true; });
    return node;
  }

  function move(event) {
    if (event.key === "Escape") { $("tip").hidden = true; return; }
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const from = event.target.closest(".mark");
    if (!step || !from) return;
    event.preventDefault();
    const all = [...event.currentTarget.querySelectorAll(".mark")];
    const key = (node) => [Number(node.dataset.row), Number(node.dataset.place)];
    const [row, place] = key(from), at = (r, q) => all.find((node) => key(node)[0] === r && key(node)[1] === q);
    let next = step[1] ? at(row, place + step[1]) : null;
    for (let r = row + step[0]; step[0] && !next && r >= 0 && r <= Math.max(...all.map((node) => key(node)[0])); r += step[0]) {
      for (let q = place; q >= 0 && !next; q--) next = at(r, q);
    }
    if (!next) return;
    from.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  function tip(node, c, r) {
    const pairs = [
      ["time", show(r.time, seconds)], ["quartiles", `${show(r.low, seconds)} to ${show(r.high, seconds)}`], ["rounds", `${r.samples}, ${r.clock} clock`],
      [FLOPS.label, show(value("flops", c, r), small)], ["GB/s", show(value("gbs", c, r), small)], ["of the limit", show(value("fraction", c, r), small)],
      ["time / ours", show(r.ratio, three)], ["compilation", show(r.compile_s, seconds)], ["temporary", show(r.temporary_bytes, (x) => `${three(x / 2 ** 20)} MiB`)],
      ["error", show(r.error, (x) => x.toExponential(1))], ["config", r.detail],
    ].filter(([, text]) => text);
    const box = $("tip");
    box.replaceChildren(el("strong", {}, r.name), el("span", {}, `${c.operation} ${c.case}, ${c.dtype}, ${c.phase}`), el("dl", {}, ...pairs.map(([a, b]) => [el("dt", {}, a), el("dd", {}, b)])));
    box.hidden = false;
    const where = node.querySelector("path").getBoundingClientRect(), size = box.getBoundingClientRect();
    const x = Math.max(8, Math.min(where.left + where.width / 2 - size.width / 2, document.documentElement.clientWidth - size.width - 8));
    const above = where.top - size.height - 12;
    box.style.left = `${x + scrollX}px`;
    box.style.top = `${(above > 0 ? above : where.bottom + 12) + scrollY}px`;
  }

  // Table ------------------------------------------------------------------
  const COLUMNS = [
    ["operation", "Operation", (c) => c.operation], ["case", "Case", (c) => c.case.replace(/^bench-/, "")], ["dtype", "Dtype", (c) => c.dtype], ["phase", "Phase", (c) => c.phase],
    ["run", "Run", (c, r) => r.name], ["status", "Standing", (c, r) => statusText(c, r)], ["time", "Time", (c, r) => r.time, seconds], ["spread", "Quartiles ±", (c, r) => (known(r.time) ? (r.high - r.low) / 2 / r.time : null), (x) => `${(100 * x).toFixed(1)} %`],
    ["flops", FLOPS.label, (c, r) => value("flops", c, r), small], ["gbs", "GB/s", (c, r) => value("gbs", c, r), small], ["fraction", "Of limit", (c, r) => value("fraction", c, r), small],
    ["ratio", "Time / ours", (c, r) => r.ratio, three], ["error", "Error", (c, r) => r.error, (x) => x.toExponential(1)],
  ];
  function statusText(c, r) {
    if (r.status !== "ok") return `${r.status}${r.reason ? `: ${r.reason}` : ""}`;
    if (!r.speaks || !known(c.ratio)) return known(r.time) ? "ok" : "not timed";
    return `${c.standing} ${three(c.ratio)} (${three(c.interval[0])} to ${three(c.interval[1])})`;
  }

  function head() {
    document.querySelector("thead").append(el("tr", {}, ...COLUMNS.map(([name, label, , format]) => {
      const button = el("button", { type: "button" }, label);
      button.addEventListener("click", () => {
        [state.sort, state.down] = [name, state.sort === name && !state.down];
        table();
      });
      return el("th", { scope: "col", "data-column": name, class: format ? "number" : null }, button);
    })));
  }

  function table() {
    for (const th of document.querySelectorAll("th")) {
      if (th.dataset.column === state.sort) th.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
    const of = COLUMNS.find(([name]) => name === state.sort)[2];
    const rows = visible().flatMap((c) => shownRuns(c).map((r) => [c, r]));
    const order = new Intl.Collator(undefined, { numeric: true }).compare;
    rows.sort(([c, r], [d, s]) => {
      const a = of(c, r), b = of(d, s), missing = (a === null || a === undefined) - (b === null || b === undefined);
      if (missing) return missing; // what has no number is last in both directions
      const found = typeof a === "number" ? a - b : order(String(a ?? ""), String(b ?? ""));
      return state.down ? -found : found;
    });
    document.querySelector("tbody").replaceChildren(...rows.map(([c, r]) => el("tr", { class: [r.speaks && "chosen", r.speaks && bad(c) && "is-loss"].filter(Boolean).join(" ") || null },
      ...COLUMNS.map(([name, , get, format]) => {
        const text = format ? show(get(c, r), format) : get(c, r);
        return el("td", { class: format ? "number" : name === "status" ? (r.speaks && bad(c) ? "wide loss" : "wide") : null, "data-column": name }, text);
      }))));
  }

  function render() {
    $("tip").hidden = true;
    const cases = visible(), width = Math.max(280, $("charts").clientWidth);
    const operations = [...new Set(cases.map((c) => c.operation))].sort();
    $("charts").replaceChildren(...operations.map((operation) => {
      const own = cases.filter((c) => c.operation === operation);
      return el("figure", { "data-operation": operation }, el("h2", {}, operation), el("p", { class: "axis" }, METRICS[state.metric].axis + (state.metric === "time" ? "; the bar is the limit" : "")), chart(operation, own, width));
    }));
    $("shown").textContent = `${cases.length} of ${some(data.cases.length, "case", "cases")}, ${data.runs.length - state.hidden.size} of ${data.runs.length} runs. At the right end: time of the best peer over ours.`;
    table();
  }

  controls();
  summary();
  head();
  render();
  let drawn = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== drawn) { drawn = innerWidth; render(); } });
})();
