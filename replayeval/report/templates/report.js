"use strict";
(() => {
  const root = document.documentElement;
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : media.matches);
  const themeButton = document.getElementById("theme");
  const holder = document.getElementById("data");
  let redraw = () => {};
  themeButton.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; redraw(); });
  media.addEventListener("change", () => redraw());
  if (!holder) { root.dataset.ready = "true"; return; }

  const data = JSON.parse(holder.textContent);
  const at = Object.fromEntries(Object.entries(data.fields).map(
    ([kind, names]) => [kind, Object.fromEntries(names.map((name, index) => [name, index]))]));
  const P = at.point, R = at.ratio, D = at.drift, T = at.task, Q = at.quartile;
  const COLOURS = {
    light: ["#0072b2", "#d55e00", "#00875a", "#b0509a", "#a67c00", "#1f9bcf", "#8c564b", "#5b5bd6"],
    dark: ["#56b4e9", "#ff8a3d", "#2fc08d", "#e58ac9", "#e6b422", "#8fd3f4", "#c79a8e", "#a5a5ff"],
  };
  const SYMBOLS = { shared: "circle", separate: "diamond", conventional: "square", other: "triangle-up" };
  const hidden = new Set();
  const state = { model: 0, cell: 0, length: null };
  const model = () => data.models[state.model];
  const cell = () => model().cells[state.cell];
  const css = name => getComputedStyle(root).getPropertyValue(name).trim();
  // Plotly reads a few HTML tags in labels; foreign names must stay text.
  const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const sci = x => x === null ? "n/a" : x === 0 ? "0" : x.toExponential(1);
  const range = (low, high, form) => low === null ? "" : ` [${form(low)}, ${form(high)}]`;
  const percent = x => x === null ? "n/a" : `${(100 * x).toFixed(x > 0.9995 && x < 1 ? 3 : 2)}%`;
  const signed = x => x === null ? "n/a" : `${x >= 0 ? "+" : "−"}${Math.abs(x).toFixed(1)}`;
  const tokens = n => n >= 1 << 20 && n % (1 << 20) === 0 ? `${n >> 20}M` : n >= 1024 && n % 1024 === 0 ? `${n / 1024}K` : `${n}`;

  const formats = [...new Set(data.models.flatMap(m => [...m.cells, ...m.tasks].flatMap(c => c.arms))
    .filter(arm => !arm.control).map(arm => arm.format))];
  const colour = arm => arm.control ? css("--floor")
    : COLOURS[dark() ? "dark" : "light"][formats.indexOf(arm.format) % COLOURS.light.length];
  const dash = arm => arm.control ? "dot" : arm.sr || arm.format === "fp32" ? "solid" : "dash";
  const faded = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const shown = arms => arms.filter(arm => !hidden.has(arm.policy));

  function lines(arms, points, hover) {
    const traces = [];
    let low = Infinity, high = -Infinity;
    const curves = shown(arms).map(arm => ({ arm, points: points(arm).filter(p => p.y !== null) }));
    for (const { points: list } of curves) for (const p of list) for (const y of [p.y, p.low, p.high])
      if (y !== null && (!lines.log || y > 0)) { low = Math.min(low, y); high = Math.max(high, y); }
    const bottom = lines.log ? low / 2 : low;
    for (const { arm, points: all } of curves) {
      const list = lines.log ? all.filter(p => p.y > 0) : all;
      if (!list.length) continue;
      const band = list.filter(p => p.low !== null);
      const ink = colour(arm);
      if (band.length > 1) traces.push({
        x: [...band.map(p => p.x), ...band.map(p => p.x).reverse()],
        y: [...band.map(p => p.high), ...band.map(p => Math.max(p.low, lines.log ? bottom : -Infinity)).reverse()],
        fill: "toself", fillcolor: faded(ink, arm.control ? 0.22 : curves.length > 5 ? 0.08 : 0.15), line: { width: 0 }, mode: "lines",
        hoverinfo: "skip", showlegend: false,
      });
      traces.push({
        x: list.map(p => p.x), y: list.map(p => p.y), mode: lines.markers ? "lines+markers" : "lines",
        line: { color: ink, width: 2, dash: dash(arm) },
        marker: { color: ink, size: 7, symbol: SYMBOLS[arm.sharing] },
        ...(band.length === 1 && list.length === 1 ? { error_y: {
          type: "data", symmetric: false, color: ink, array: [band[0].high - band[0].y],
          arrayminus: [band[0].y - Math.max(band[0].low, bottom)] } } : {}),
        hoverinfo: "text", hovertext: list.map(p => `<b>${plain(arm.policy)}</b><br>${hover(p)}`), showlegend: false,
      });
    }
    return { traces, low, high };
  }
  const logLines = (arms, points, hover, markers = true) => {
    lines.log = true; lines.markers = markers; return lines(arms, points, hover);
  };
  const linearLines = (arms, points, hover) => { lines.log = false; lines.markers = true; return lines(arms, points, hover); };

  function layout(changes) {
    const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, automargin: true, ticks: "outside",
      tickcolor: css("--line"), title: { standoff: 8 } };
    const merged = { margin: { l: 58, r: 12, t: 8, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: css("--text") }, showlegend: false, hovermode: "closest",
      hoverlabel: { bgcolor: css("--bg"), bordercolor: css("--line"), font: { color: css("--text") }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--text") }, ...changes };
    merged.xaxis = { ...axis, ...changes.xaxis }; merged.yaxis = { ...axis, ...changes.yaxis };
    return merged;
  }
  function logAxis(title, low, high) {
    const decades = Number.isFinite(low) && low > 0 ? Math.log10(high / low) : 1;
    return { type: "log", title: { text: title, standoff: 8 }, exponentformat: "power",
      ...(decades > 2.2 ? { dtick: Math.max(1, Math.ceil(decades / 7)) } : decades > 0.7 ? { tickformat: ".0e", dtick: "D2" } : { tickformat: ".1e", nticks: 6 }),
      ...(Number.isFinite(low) ? { range: [Math.log10(low) - 0.06 * decades - 0.05, Math.log10(high) + 0.06 * decades + 0.05] } : {}) };
  }
  function lengthAxis(lengths, title = "generation length N (tokens)") {
    const kept = lengths.filter((_, i) => (lengths.length - 1 - i) % Math.ceil(lengths.length / 8) === 0);
    return { type: "log", title: { text: title, standoff: 8 }, tickvals: kept.map(l => l[0]), ticktext: kept.map(l => l[1]),
      range: [Math.log10(lengths[0][0]) - 0.05, Math.log10(lengths.at(-1)[0]) + 0.05] };
  }
  const line = (axis, value, text, ink) => ({
    shape: { type: "line", [axis === "y" ? "xref" : "yref"]: "paper", [axis === "y" ? "x0" : "y0"]: 0,
      [axis === "y" ? "x1" : "y1"]: 1, [`${axis}0`]: value, [`${axis}1`]: value, line: { color: ink, width: 1.2, dash: "dashdot" } },
    note: { text, showarrow: false, font: { size: 11, color: ink },
      ...(axis === "y" ? { xref: "paper", x: 1, xanchor: "right", yanchor: "bottom" } : { yref: "paper", y: 1, xanchor: "left", yanchor: "top" }) },
  });
  function limitLine(limit, text, { log = false, axis = "y" } = {}) {
    if (limit === null) return {};
    const made = line(axis, limit, text, css("--fail"));
    made.note[axis] = log ? Math.log10(limit) : limit;
    return { shapes: [made.shape], annotations: [made.note] };
  }
  const count = p => `${p[P.documents]} documents, ${p[P.tokens].toLocaleString("en")} tokens`;
  const upTo = p => `N = ${tokens(p.x)}`;

  const drawers = {
    kl() {
      const points = arm => arm.points.map(p => ({ x: p[P.n], y: p[P.mean], low: p[P.low], high: p[P.high], p }));
      const { traces, low, high } = logLines(cell().arms, points,
        q => `${upTo(q)}<br>KL ${sci(q.y)}${range(q.low, q.high, sci)} nats<br>${count(q.p)}`);
      const zero = shown(cell().arms).filter(arm => arm.points.some(p => p[P.mean] !== null && p[P.mean] <= 0));
      const limit = data.limits.kl;
      return { traces, empty: "every KL is exactly 0 or undefined", layout: layout({ xaxis: lengthAxis(cell().lengths),
        yaxis: logAxis("mean KL to N (nats/token)", limit === null ? low : Math.min(low, limit), limit === null ? high : Math.max(high, limit)),
        ...limitLine(limit, `limit ${limit}`, { log: true }) }),
        note: zero.length ? `Not on a logarithmic axis (0 or below): ${zero.map(arm => arm.policy).join(", ")}.` : "" };
    },
    top1() {
      const points = arm => arm.points.map(p => ({ x: p[P.n], y: p[P.top1], low: p[P.top1_low], high: p[P.top1_high], p }));
      const { traces } = linearLines(cell().arms, points,
        q => `${upTo(q)}<br>top-1 agreement ${percent(q.y)}${range(q.low, q.high, percent)}<br>${count(q.p)}`);
      return { traces, empty: "no agreement was measured", layout: layout({ xaxis: lengthAxis(cell().lengths),
        yaxis: { title: { text: "top-1 agreement to N" }, tickformat: ".2~%" }, ...limitLine(data.limits.top1, `limit ${percent(data.limits.top1)}`) }) };
    },
    nll() {
      const points = arm => arm.points.map(p => ({ x: p[P.n], y: p[P.nll], low: p[P.nll_low], high: p[P.nll_high], p }));
      const { traces } = linearLines(cell().arms, points,
        q => `${upTo(q)}<br>ΔNLL ${sci(q.y)}${range(q.low, q.high, sci)} nats<br>${count(q.p)}`);
      return { traces, empty: "no likelihood was measured", layout: layout({ xaxis: lengthAxis(cell().lengths),
        yaxis: { title: { text: "ΔNLL to N (nats/token)" }, exponentformat: "power" }, ...limitLine(data.limits.nll, `limit ${data.limits.nll}`) }) };
    },
    drift() {
      const fine = cell().arms.some(arm => arm.drift);
      const points = arm => fine
        ? (arm.drift || []).map(d => ({ x: Math.sqrt(Math.max(d[D.start], 1) * d[D.stop]), y: d[D.mean], low: d[D.low], high: d[D.high],
            text: `positions ${d[D.start] + 1}–${d[D.stop]}`, docs: d[D.documents] }))
        : arm.points.map(p => ({ x: 0.75 * p[P.n], y: p[P.local], low: p[P.local_low], high: p[P.local_high],
            text: `positions ${Math.floor(p[P.n] / 2) + 1}–${p[P.n]}`, docs: p[P.documents] }));
      const { traces, low, high } = logLines(cell().arms, points,
        q => `${q.text}<br>KL ${sci(q.y)}${range(q.low, q.high, sci)} nats<br>${q.docs} documents`, !fine);
      const lengths = cell().lengths, first = fine ? [[16, "16"], [64, "64"]].filter(l => l[0] < lengths[0][0]) : [];
      const axis = lengthAxis([...first, ...lengths], "position in the generation (tokens)");
      if (fine) axis.range[0] = Math.log10(3.5);
      return { traces, empty: "no drift was measured", layout: layout({ xaxis: axis, yaxis: logAxis("KL at that position (nats/token)", low, high) }),
        note: fine ? "Bins of a quarter octave, from the numbers of every token." : "One point per octave (N/2, N], from the record." };
    },
    window() {
      const here = cell(), n = state.length;
      const families = new Map();
      for (const other of model().cells) {
        if (other.data !== here.data) continue;
        for (const arm of other.arms) {
          const p = arm.points.find(q => q[P.n] === n);
          if (!p || arm.sharing === "conventional" || arm.sharing === "other") continue;
          if (!families.has(arm.family)) families.set(arm.family, { ...arm, policy: arm.family, seen: new Map() });
          families.get(arm.family).seen.set(arm.window, p);
        }
      }
      const swept = [...families.values()].filter(f => f.seen.size > 1);
      const visible = new Set(shown(here.arms).map(arm => arm.family));
      const arms = swept.filter(f => visible.has(f.family) || !here.arms.some(arm => arm.family === f.family));
      const points = f => [...f.seen].sort((a, b) => a[0] - b[0]).map(
        ([L, p]) => ({ x: L, y: p[P.mean], low: p[P.low], high: p[P.high], p }));
      const { traces, low, high } = logLines(arms, points,
        q => `L = ${q.x}, N = ${tokens(n)}<br>KL ${sci(q.y)}${range(q.low, q.high, sci)} nats<br>${count(q.p)}`);
      const windows = [...new Set(swept.flatMap(f => [...f.seen.keys()]))].sort((a, b) => a - b).map(L => [L, `${L}`]);
      return { traces, empty: "no policy was measured at several windows L", layout: windows.length ? layout({
        xaxis: lengthAxis(windows, "window L (tokens)"), yaxis: logAxis(`mean KL to ${tokens(n)} (nats/token)`, low, high) }) : null };
    },
    ratio() {
      const styles = new Map(cell().arms.map(arm => [arm.policy, arm]));
      const pairs = cell().ratios.map(pair => ({ ...(styles.get(pair.stochastic) || {}), policy: pair.stochastic, nearest: pair.nearest, points: pair.points }));
      const points = pair => pair.points.map(p => ({ x: p[R.n], y: p[R.ratio], low: p[R.low], high: p[R.high], docs: p[R.documents] }));
      const { traces, low, high } = logLines(pairs, points,
        q => `${upTo(q)}<br>KL nearest / KL stochastic ${q.y.toPrecision(3)}${range(q.low, q.high, x => x.toPrecision(3))}<br>${q.docs} documents`);
      const one = line("y", 1, "equal", css("--muted"));
      one.note.y = 0;
      return { traces, empty: "no two arms differ in stochastic rounding alone", layout: layout({ xaxis: lengthAxis(cell().lengths),
        yaxis: { ...logAxis("nearest / stochastic", Math.min(low, 0.8), Math.max(high, 1.25)), tickformat: ".2~g", dtick: undefined, nticks: 7 },
        shapes: [one.shape], annotations: [one.note] }) };
    },
    pareto() {
      const n = state.length, traces = [], front = cell().front[n] || [];
      const value = arm => arm.points.find(p => p[P.n] === n);
      const usable = arm => arm.bits !== null && value(arm) && value(arm)[P.mean] > 0;
      const steps = front.map(i => cell().arms[i]).filter(usable);
      let low = Infinity, high = -Infinity;
      if (steps.length > 1) traces.push({ x: steps.map(arm => arm.bits), y: steps.map(arm => value(arm)[P.mean]), mode: "lines",
        line: { color: css("--muted"), width: 1.5, dash: "dot", shape: "hv" }, hoverinfo: "skip" });
      for (const arm of shown(cell().arms).filter(usable)) {
        const p = value(arm), ink = colour(arm), best = steps.includes(arm);
        for (const y of [p[P.mean], p[P.low], p[P.high]]) if (y > 0) { low = Math.min(low, y); high = Math.max(high, y); }
        traces.push({ x: [arm.bits], y: [p[P.mean]], mode: "markers",
          marker: { color: best ? ink : faded(ink, 0.35), size: best ? 12 : 9, symbol: SYMBOLS[arm.sharing] + (arm.sr ? "" : "-open"), line: { width: 2, color: ink } },
          ...(p[P.low] === null ? {} : { error_y: { type: "data", symmetric: false, color: ink, thickness: 1.2, width: 3,
            array: [p[P.high] - p[P.mean]], arrayminus: [p[P.mean] - Math.max(p[P.low], p[P.mean] / 1e3)] } }),
          hoverinfo: "text", hovertext: [`<b>${plain(arm.policy)}</b><br>${arm.bits} bits per state element<br>KL to ${tokens(n)} ${sci(p[P.mean])}${range(p[P.low], p[P.high], sci)} nats<br>${count(p)}${best ? "<br>on the Pareto front" : ""}`] });
      }
      const limit = data.limits.kl;
      if (limit !== null) { low = Math.min(low, limit); high = Math.max(high, limit); }
      const ticks = [2, 4, 8, 16, 24, 32, 40, 48, 64];
      const bits = cell().arms.map(arm => arm.bits).filter(b => b !== null);
      return { traces, empty: "the stored bits or the KL of every arm are unknown", layout: layout({
        xaxis: { type: "log", title: { text: "stored bits per state element" }, tickvals: ticks, ticktext: ticks.map(String),
          ...(bits.length ? { range: [Math.log10(Math.min(...bits)) - 0.08, Math.log10(Math.max(...bits)) + 0.08] } : {}) },
        yaxis: logAxis(`mean KL to ${tokens(n)} (nats/token)`, low, high), ...limitLine(limit, `limit ${limit}`, { log: true }) }),
        note: "Full symbols round stochastically, open ones to nearest; the dotted line is the Pareto front." };
    },
    tasks() {
      const traces = [], tasks = model().tasks;
      const rows = tasks.map(task => task.name);
      const arms = [...new Map(tasks.flatMap(task => task.arms).map(arm => [arm.policy, arm])).values()];
      const visible = shown(arms);
      visible.forEach((arm, index) => {
        const found = tasks.map((task, row) => ({ task, row, arm: task.arms.find(a => a.policy === arm.policy) })).filter(f => f.arm && f.arm.values[T.delta] !== null);
        const ink = colour(arm), offset = visible.length > 1 ? (index / (visible.length - 1) - 0.5) * 0.6 : 0;
        if (found.length) traces.push({ x: found.map(f => f.arm.values[T.delta]), y: found.map(f => f.row + offset), mode: "markers",
          marker: { color: ink, size: 9, symbol: SYMBOLS[arm.sharing] + (arm.sr ? "" : "-open"), line: { width: 2, color: ink } },
          error_x: { type: "data", symmetric: false, color: ink, thickness: 1.5, width: 3,
            array: found.map(f => f.arm.values[T.high] === null ? 0 : f.arm.values[T.high] - f.arm.values[T.delta]),
            arrayminus: found.map(f => f.arm.values[T.low] === null ? 0 : f.arm.values[T.delta] - f.arm.values[T.low]) },
          hoverinfo: "text", hovertext: found.map(f => { const v = f.arm.values; return `<b>${plain(arm.policy)}</b><br>${plain(f.task.name)}, ${plain(f.task.metric)}, ${f.task.n} documents<br>` +
            `${percent(v[T.accuracy])} against ${percent(v[T.reference])}<br>Δ ${signed(v[T.delta])}${range(v[T.low], v[T.high], signed)} pp, Holm p ${v[T.p_holm] === null ? "n/a" : v[T.p_holm].toPrecision(2)}<br>` +
            `${v[T.wrong]} flips to wrong, ${v[T.right]} to right; smallest detectable ${v[T.mde] === null ? "n/a" : v[T.mde] + " pp"}`; }) });
      });
      const zero = line("x", 0, "", css("--muted"));
      const limit = data.limits.drop === null ? {} : limitLine(-data.limits.drop, `limit −${data.limits.drop}`, { axis: "x" });
      return { traces, empty: "no tasks were measured on this model", height: Math.max(200, 70 + rows.length * Math.max(36, 15 * visible.length)), layout: layout({
        xaxis: { title: { text: "accuracy minus reference (percentage points)" } },
        yaxis: { tickvals: rows.map((_, i) => i), ticktext: rows.map(name => plain(name.length > 22 ? name.slice(0, 21) + "…" : name)), range: [rows.length - 0.5, -0.5] },
        shapes: [zero.shape, ...(limit.shapes || [])], annotations: limit.annotations || [] }) };
    },
    quartiles() {
      const traces = [], tasks = model().tasks.filter(task => task.arms.some(arm => arm.quartiles.length));
      const task = tasks[0];
      if (!task) return { traces, empty: "no accuracy by output length was measured" };
      const visible = shown(task.arms);
      visible.forEach((arm, index) => {
        const list = arm.quartiles.filter(q => q[Q.delta] !== null), ink = colour(arm);
        const offset = visible.length > 1 ? (index / (visible.length - 1) - 0.5) * 0.5 : 0;
        if (list.length) traces.push({ x: list.map(q => q[Q.quartile] + offset), y: list.map(q => q[Q.delta]), mode: "markers+lines",
          line: { color: faded(ink, 0.4), width: 1 }, marker: { color: ink, size: 9, symbol: SYMBOLS[arm.sharing] + (arm.sr ? "" : "-open"), line: { width: 2, color: ink } },
          error_y: { type: "data", symmetric: false, color: ink, thickness: 1.5, width: 3,
            array: list.map(q => q[Q.high] === null ? 0 : q[Q.high] - q[Q.delta]), arrayminus: list.map(q => q[Q.low] === null ? 0 : q[Q.delta] - q[Q.low]) },
          hoverinfo: "text", hovertext: list.map(q => `<b>${plain(arm.policy)}</b><br>quartile ${q[Q.quartile]}: ${q[Q.tokens_low] === null ? "" : `reference outputs of ${Math.round(q[Q.tokens_low])}–${Math.round(q[Q.tokens_high])} tokens, `}${q[Q.n]} documents<br>` +
            `${percent(q[Q.accuracy])} against ${percent(q[Q.reference])}<br>Δ ${signed(q[Q.delta])}${range(q[Q.low], q[Q.high], signed)} pp`) });
      });
      const zero = line("y", 0, "", css("--muted"));
      return { traces, empty: "no accuracy by output length was measured", note: `Task ${task.name}${tasks.length > 1 ? `; ${tasks.length - 1} more in quartiles.csv` : ""}.`, layout: layout({
        xaxis: { title: { text: "quartile of the reference's output length (1 = shortest)" }, tickvals: [1, 2, 3, 4], range: [0.5, 4.5] },
        yaxis: { title: { text: "accuracy minus reference (pp)" } }, shapes: [zero.shape] }) };
    },
  };
  const groups = [...new Set(data.trends.map(t => t.group))];
  const trendSelect = document.getElementById("trend-group");
  drawers.trend = () => {
    if (!trendSelect) return { traces: [], empty: "" };
    const group = groups[Number(trendSelect.value) || 0], curves = shown(data.trends.filter(t => t.group === group));
    const nights = [...new Set(data.trends.flatMap(t => t.points.map(p => p[0])))].sort();
    const log = curves.some(t => t.log), traces = [];
    let low = Infinity, high = -Infinity;
    for (const curve of curves) {
      const points = curve.points.filter(p => !log || p[1] > 0), ink = colour(curve);
      for (const p of points) { low = Math.min(low, p[1]); high = Math.max(high, p[1]); }
      traces.push({ x: points.map(p => p[0]), y: points.map(p => p[1]), mode: "lines+markers", line: { color: ink, width: curve.kind ? 3 : 1.5, dash: dash(curve) },
        marker: { color: ink, size: curve.kind ? 9 : 6, symbol: SYMBOLS[curve.sharing] }, hoverinfo: "text",
        hovertext: points.map(p => `<b>${plain(curve.policy)}</b>${curve.kind ? ` (${curve.kind})` : ""}<br>${p[0]}<br>${plain(group)}<br>${p[1].toPrecision(3)}`) });
    }
    const step = Math.ceil(nights.length / 8), kept = nights.filter((_, i) => (nights.length - 1 - i) % step === 0);
    return { traces, empty: "no series has a night behind it", layout: layout({
      xaxis: { type: "category", categoryorder: "array", categoryarray: nights, tickvals: kept, ticktext: kept.map(n => n.slice(5, 10)), title: { text: "night" } },
      yaxis: log ? logAxis("mean over documents", low, high) : { title: { text: "mean over documents" } } }),
      note: "Thick lines changed tonight or are still changed." };
  };
  const NEEDS_CELL = new Set(["kl", "top1", "nll", "drift", "window", "ratio", "pareto"]);

  function draw(name) {
    const figure = document.getElementById(`plot-${name}`);
    if (!figure) return Promise.resolve();
    const target = figure.querySelector(".plot"), empty = figure.querySelector(".empty");
    const made = NEEDS_CELL.has(name) && !cell() ? { traces: [], empty: "no distributions were measured on this model" } : drawers[name]();
    const bare = !made.traces.length;
    figure.classList.toggle("bare", bare);
    const hint = hidden.size ? " among the arms shown" : "";
    empty.textContent = bare ? `Nothing to draw: ${made.empty}${hint}.` : made.note || "";
    empty.hidden = !empty.textContent;
    if (bare) { Plotly.purge(target); return Promise.resolve(); }
    if (made.height) target.style.height = `${made.height}px`;
    return Plotly.react(target, made.traces, made.layout, { responsive: true, displaylogo: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], toImageButtonOptions: { filename: `replayeval-${name}`, scale: 2 } });
  }
  function options(select, texts, chosen) {
    select.replaceChildren(...texts.map((text, index) => new Option(text, index, false, index === chosen)));
    select.parentElement.hidden = texts.length < 2;
    select.parentElement.style.display = texts.length < 2 ? "none" : "";
  }
  function sample(arm) {
    const ink = colour(arm), name = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(name, "svg"), stroke = document.createElementNS(name, "line");
    svg.setAttribute("width", 26); svg.setAttribute("height", 10); svg.setAttribute("aria-hidden", "true");
    for (const [key, value] of Object.entries({ x1: 0, x2: 26, y1: 5, y2: 5, stroke: ink, "stroke-width": 2, "stroke-dasharray": { solid: "none", dash: "6 3", dot: "2 3" }[dash(arm)] })) stroke.setAttribute(key, value);
    const marks = { circle: "M13 1.2a3.8 3.8 0 1 0 .01 0z", diamond: "M13 .4 17.6 5 13 9.6 8.4 5z", square: "M9.5 1.5h7v7h-7z", "triangle-up": "M13 1 17 9H9z" };
    const mark = document.createElementNS(name, "path");
    mark.setAttribute("d", marks[SYMBOLS[arm.sharing]]); mark.setAttribute("fill", ink);
    svg.append(stroke, mark);
    return svg;
  }
  function legend() {
    const arms = [...new Map([...(cell() ? cell().arms : []), ...model().tasks.flatMap(task => task.arms)].map(arm => [arm.policy, arm])).values()];
    document.getElementById("legend").replaceChildren(...arms.map(arm => {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", String(!hidden.has(arm.policy)));
      button.append(sample(arm), document.createTextNode(arm.policy + (arm.control ? " (floor)" : "") + (arm.diverged ? ` (diverged at ${arm.diverged})` : "")));
      button.addEventListener("click", () => { hidden.has(arm.policy) ? hidden.delete(arm.policy) : hidden.add(arm.policy); redraw(); });
      return button;
    }));
  }
  function choose() {
    const here = cell();
    options(modelSelect, data.models.map(m => m.name), state.model);
    options(cellSelect, model().cells.map(c => [c.data, `L = ${c.window}`, c.where].filter(Boolean).join(" · ")), state.cell);
    const lengths = here ? here.lengths : [];
    if (!lengths.some(l => l[0] === state.length)) state.length = lengths.length ? lengths.at(-1)[0] : null;
    options(lengthSelect, lengths.map(l => l[1]), lengths.findIndex(l => l[0] === state.length));
    document.getElementById("cell-note").textContent = here
      ? `${here.docs} documents, ${here.tokens.toLocaleString("en")} tokens, default window ${here.window}, reference ${here.reference}. ${here.provenance}.${here.caution ? ` Caution: ${here.caution}.` : ""}` : "";
  }
  const modelSelect = document.getElementById("model"), cellSelect = document.getElementById("cell"), lengthSelect = document.getElementById("length");
  modelSelect.addEventListener("change", () => { state.model = Number(modelSelect.value); state.cell = 0; redraw(); });
  cellSelect.addEventListener("change", () => { state.cell = Number(cellSelect.value); redraw(); });
  lengthSelect.addEventListener("change", () => { state.length = cell().lengths[Number(lengthSelect.value)][0]; redraw(); });
  if (trendSelect) {
    options(trendSelect, groups, 0);
    trendSelect.addEventListener("change", () => draw("trend"));
  }
  redraw = () => {
    choose(); legend();
    return Promise.all(Object.keys(drawers).map(draw)).then(() => { root.dataset.ready = "true"; });
  };
  redraw();
})();
