/* The page: state, drawing, dragging. All numbers come from mathematics.js. */
"use strict";

const Playground = (() => {
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const LIMITS = { samples: 6, tokens: 6, coordinate: 1000, steps: 2000, quickSteps: 200 };
  const P_MIN = 1.05;
  const P_MAX = 20;

  let state; // { p, source, head, samples, heads }
  let view; // half the width of the plane in its own units
  let result; // what `compute` found
  let time = 0; // the step of the descent that is shown
  let timer = null;

  // -- state: presets, links, files -------------------------------------------------------------

  const clone = (value) => JSON.parse(JSON.stringify(value));

  /** A state made of untrusted JSON, or an Error that says what is wrong with it. */
  function checked(value) {
    const pair = (x, name) => {
      const good = Array.isArray(x) && x.length === 2 && x.every((c) =>
        typeof c === "number" && Math.abs(c) <= LIMITS.coordinate);
      if (!good) throw new Error(`${name} must be two numbers of size at most ${LIMITS.coordinate}`);
      return [x[0], x[1]];
    };
    const list = (x, name, least, most) => {
      if (!Array.isArray(x) || x.length < least || x.length > most) {
        throw new Error(`${name} must be a list of ${least} to ${most}`);
      }
      return x;
    };
    if (typeof value !== "object" || value === null) throw new Error("the state must be an object");
    const p = value.p === "infinity" ? Infinity : value.p;
    if (!(p === 1 || p === Infinity || (p >= P_MIN && p <= P_MAX))) {
      throw new Error(`p must be 1, "infinity" or from ${P_MIN} to ${P_MAX}`);
    }
    const samples = list(value.samples, "samples", 1, LIMITS.samples).map((s, i) => {
      if (s === null || (s.y !== 1 && s.y !== -1)) throw new Error(`the label of sample ${i + 1} must be 1 or -1`);
      const tokens = list(s.tokens, `tokens of sample ${i + 1}`, 2, LIMITS.tokens);
      return { tokens: tokens.map((x) => pair(x, "a token")), z: pair(s.z, "a query"), y: s.y };
    });
    const heads = list(value.heads, "heads", 1, 2).map((v) => pair(v, "a head"));
    const head = value.head === 1 && heads.length === 2 ? 1 : 0;
    return { p, source: value.source === "scores" ? "scores" : "path", head, samples, heads };
  }

  const plain = () => ({ ...state, p: state.p === Infinity ? "infinity" : state.p });

  const encode = (value) => btoa(JSON.stringify(value))
    .replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  const decode = (text) => JSON.parse(atob(text.replaceAll("-", "+").replaceAll("_", "/")));

  function load(value) {
    state = checked(value);
    const reach = Math.max(...[...state.samples.flatMap((s) => [...s.tokens, s.z]), ...state.heads]
      .flat().map(Math.abs));
    view = Math.max(1.25 * reach, 1);
    time = Infinity;
    controls();
    update(true);
  }

  // -- what is shown ------------------------------------------------------------------------------

  /** Solve everything for the current state; `full` takes the long path as well. */
  function compute(full) {
    const problem = { samples: state.samples, heads: state.heads };
    const pathP = Math.min(Math.max(state.p, P_MIN), P_MAX);
    const path = Mirror.descend(problem, pathP, full ? LIMITS.steps : LIMITS.quickSteps);
    const last = path[path.length - 1][state.head];
    const best = Mirror.bestTokens(problem, state.head);
    const tokens = state.source === "scores" ? best : Mirror.selected(problem, last);
    const solution = Mirror.attentionSvm(problem, tokens, state.p);
    const euclidean = state.p === 2 ? solution : Mirror.attentionSvm(problem, tokens, 2);
    const support = Mirror.supportTokens(solution);
    const local = Mirror.locallyOptimal(problem, tokens, solution, state.head);
    return { problem, pathP, path, best, tokens, solution, euclidean, support, local };
  }

  function update(full) {
    result = compute(full);
    time = Math.min(time, result.path.length - 1);
    drawPlane();
    drawCertificate();
    drawPath();
    if (full) { // while a point is dragged these wait
      drawSamples();
      $("python").textContent = python();
    }
  }

  const element = (parent, name, attributes = {}, text = "") => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    parent.append(made);
    return made;
  };
  const clear = (node) => { node.replaceChildren(); return node; };
  const screen = ([x, y]) => [300 + (290 * x) / view, 300 - (290 * y) / view];
  const colour = (i) => `var(--s${i})`;

  // -- the plane -----------------------------------------------------------------------------------

  function drawPlane() {
    const focused = document.activeElement?.dataset?.handle;
    const svg = clear($("plane"));
    const unit = [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500].find((u) => view / u <= 8) ?? 1000;
    for (let x = -Math.floor(view / unit) * unit; x <= view; x += unit) {
      const [sx, sy] = screen([x, x]);
      const kind = Math.abs(x) < unit / 2 ? "axis" : "grid";
      element(svg, "line", { class: kind, x1: sx, x2: sx, y1: 0, y2: 600 });
      element(svg, "line", { class: kind, x1: 0, x2: 600, y1: sy, y2: sy });
    }
    element(svg, "text", { class: "small", x: 4, y: 594 }, `one square is ${unit}`);
    const { solution, euclidean, tokens, support, best } = result;
    state.samples.forEach((sample, i) => {
      if (euclidean.status === "optimal" && state.p !== 2) separator(svg, i, euclidean.W, "line faint");
      if (solution.status === "optimal") separator(svg, i, solution.W, "line");
    });
    state.heads.forEach((v, h) => {
      const [x, y] = screen(v);
      element(svg, "line", { class: "axis", x1: 300, y1: 300, x2: x, y2: y, "stroke-width": 3 });
      const name = state.heads.length > 1 ? `head v${h + 1}` : "head v";
      const handle = makeHandle(svg, `head-${h}`, v, name);
      element(handle, "rect", { x: -6, y: -6, width: 12, height: 12, fill: "var(--ink)" });
      element(handle, "text", { x: 10, y: 4 }, state.heads.length > 1 ? `v${h + 1}` : "v");
    });
    state.samples.forEach((sample, i) => {
      const z = makeHandle(svg, `query-${i}`, sample.z, `query z of sample ${i + 1}`);
      element(z, "path", { d: "M0 -8 L8 0 L0 8 L-8 0 Z", fill: colour(i), "fill-opacity": 0.55 });
      element(z, "text", { x: 10, y: 4, class: "small" }, `z${i + 1}`);
    });
    state.samples.forEach((sample, i) => sample.tokens.forEach((token, t) => {
      const isSelected = tokens[i] === t;
      const isSupport = support.some((c) => c.sample === i && c.token === t);
      const notes = [isSelected && "selected", isSupport && "support token", best[i] === t && "best score"];
      const name = [`token ${t + 1} of sample ${i + 1}`, ...notes.filter(Boolean)].join(", ");
      const handle = makeHandle(svg, `token-${i}-${t}`, token, name);
      handle.style.color = colour(i);
      if (isSupport) element(handle, "rect", { class: "support", x: -13, y: -13, width: 26, height: 26 });
      if (isSelected) element(handle, "circle", { class: "ring", r: 13 });
      element(handle, "circle", { r: 8, fill: colour(i) });
      const label = `${i + 1}.${t + 1}${best[i] === t ? " ★" : ""}`;
      element(handle, "text", { x: 15, y: -10 }, label);
    }));
    if (focused) svg.querySelector(`[data-handle="${focused}"]`)?.focus({ preventScroll: true });
  }

  /** The line halfway between the selected token and its margin, across W z. */
  function separator(svg, i, W, kind) {
    const sample = state.samples[i];
    const h = Mirror.direction(W, sample.z);
    const size = h[0] ** 2 + h[1] ** 2;
    if (!(size > 0)) return;
    const alpha = sample.tokens[result.tokens[i]];
    const foot = [alpha[0] - (0.5 * h[0]) / size, alpha[1] - (0.5 * h[1]) / size];
    const along = [-h[1] / Math.sqrt(size), h[0] / Math.sqrt(size)];
    const [x1, y1] = screen([foot[0] - 4 * view * along[0], foot[1] - 4 * view * along[1]]);
    const [x2, y2] = screen([foot[0] + 4 * view * along[0], foot[1] + 4 * view * along[1]]);
    const line = element(svg, "line", { class: kind, x1, y1, x2, y2 });
    line.style.color = colour(i);
  }

  function makeHandle(svg, id, point, name) {
    const [x, y] = screen(point);
    const handle = element(svg, "g", {
      class: "handle", transform: `translate(${x} ${y})`, tabindex: 0, role: "button",
      "data-handle": id, "aria-label": `${name}, at ${point.map((c) => c.toFixed(2)).join(", ")}`,
    });
    element(handle, "circle", { r: 16, fill: "transparent" });
    return handle;
  }

  /** The array behind a handle: [x, y], changed in place. */
  function place(id) {
    const [kind, i, t] = id.split("-");
    if (kind === "head") return state.heads[Number(i)];
    return kind === "query" ? state.samples[Number(i)].z : state.samples[Number(i)].tokens[Number(t)];
  }

  function move(id, [x, y], full) {
    const bound = (c) => Math.round(Math.min(Math.max(c, -view), view) * 1000) / 1000;
    const point = place(id);
    point[0] = bound(x);
    point[1] = bound(y);
    $("preset").value = "";
    update(full);
  }

  function dragging() {
    const svg = $("plane");
    let held = null;
    const at = (event) => {
      const { x, y } = new DOMPoint(event.clientX, event.clientY)
        .matrixTransform(svg.getScreenCTM().inverse());
      return [((x - 300) * view) / 290, ((300 - y) * view) / 290];
    };
    svg.addEventListener("pointerdown", (event) => {
      held = event.target.closest("[data-handle]")?.dataset.handle ?? null;
      if (held) svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => { if (held) move(held, at(event), false); });
    const release = () => { if (held) { held = null; update(true); } };
    svg.addEventListener("pointerup", release);
    svg.addEventListener("pointercancel", release);
    svg.addEventListener("keydown", (event) => {
      const id = event.target.dataset?.handle;
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!id || !by) return;
      event.preventDefault();
      const length = (event.shiftKey ? 0.1 : 0.02) * view;
      const point = place(id);
      move(id, [point[0] + by[0] * length, point[1] + by[1] * length], true);
    });
  }

  // -- words and tables -----------------------------------------------------------------------------

  const exponent = (p) => (p === Infinity ? "∞" : String(Number(p.toPrecision(3))));

  function drawCertificate() {
    const { solution, tokens, local, best, problem } = result;
    const p = exponent(state.p);
    const node = clear($("certificate"));
    const say = (text, kind) => {
      const part = document.createElement(kind ? "strong" : "span");
      if (kind) part.className = kind;
      part.textContent = text;
      node.append(part);
    };
    if (solution.status === "optimal") {
      say("Optimal. ", "good");
      say(`‖W‖ for p = ${p} is ${solution.norm.toPrecision(6)}. The dual proves that no W which keeps these `
        + `tokens ahead by 1 has a smaller norm, up to a relative gap of ${solution.gap.toExponential(1)}. `
        + `W = [${solution.W.map((x) => x.toPrecision(4)).join(", ")}] by rows.`);
    } else if (solution.status === "infeasible") {
      say("No W selects these tokens. ", "bad");
      const used = solution.list.map((c, k) => [c, solution.dual[k]]).filter(([, weight]) => weight > 1e-9);
      const terms = used.map(([c, weight]) => `${weight.toPrecision(3)} × “sample ${c.sample + 1}: token `
        + `${tokens[c.sample] + 1} ahead of token ${c.token + 1}”`);
      say(`Proof: add the constraints with the weights ${terms.join(" + ")}. The left sides cancel, `
        + "the right sides add up to 1, and 0 ≥ 1 is false.");
    } else say("The solver did not reach its tolerance here. Move a point a little.", "bad");
    const same = tokens.every((t, i) => t === best[i]);
    const scores = Mirror.scores(problem)[state.head];
    const worse = result.support.find((c) => scores[c.sample][c.token] >= scores[c.sample][tokens[c.sample]]);
    $("optimality").textContent = solution.status !== "optimal" ? ""
      : (same ? "The selected tokens are globally optimal: each has the best score of its sample. "
        : "Not every selected token has the best score of its sample. ")
        + (local ? "They are locally optimal: every support token scores lower."
          : `They are not locally optimal: support token ${worse.token + 1} of sample ${worse.sample + 1} does not score lower.`);
  }

  function drawSamples() {
    const body = clear($("samples").tBodies[0]);
    state.samples.forEach((sample, i) => {
      const row = body.insertRow();
      const name = row.insertCell();
      name.textContent = `● ${i + 1}`;
      name.style.color = colour(i);
      button(row.insertCell(), sample.y > 0 ? "+1" : "−1", `Change the label of sample ${i + 1}`, () => {
        sample.y = -sample.y;
      });
      row.insertCell().textContent = String(result.tokens[i] + 1);
      row.insertCell().textContent = String(result.best[i] + 1);
      const edit = row.insertCell();
      edit.className = "row";
      button(edit, "+", `Add a token to sample ${i + 1}`, () => {
        if (sample.tokens.length < LIMITS.tokens) sample.tokens.push([0.3 * view, -0.3 * view]);
      });
      button(edit, "−", `Remove the last token of sample ${i + 1}`, () => {
        if (sample.tokens.length > 2) sample.tokens.pop();
      });
      button(edit, "×", `Remove sample ${i + 1}`, () => {
        if (state.samples.length > 1) state.samples.splice(i, 1);
      });
    });
  }

  function button(parent, text, name, action) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.setAttribute("aria-label", name);
    made.addEventListener("click", () => { action(); $("preset").value = ""; update(true); });
    parent.append(made);
  }

  // -- the descent ------------------------------------------------------------------------------------

  const divergenceAt = (k) => {
    const { solution, path } = result;
    const W = path[k][state.head];
    if (solution.status !== "optimal" || !W.some(Boolean) || state.p !== result.pathP) return NaN;
    return Mirror.divergence(solution.W, W, state.p);
  };

  function drawPath() {
    const { path, solution, problem, pathP } = result;
    const W = path[time][state.head];
    $("time").max = String(LIMITS.steps);
    $("time").value = String(time);
    $("time-value").textContent = String(time);
    const D = divergenceAt(time);
    const chosen = Mirror.selected(problem, W).map((t) => t + 1).join(", ");
    $("path-note").textContent = (state.p === pathP ? "" : `Mirror descent needs 1 < p < ∞: this path has p = ${exponent(pathP)}. `)
      + (time === 0 ? "At W = 0 attention is uniform." : `Attention is largest on tokens ${chosen}.`)
      + (Number.isNaN(D) ? "" : ` Divergence from the solution: ${D.toExponential(2)}.`);
    const bars = clear($("bars"));
    problem.samples.forEach((sample, i) => Mirror.attention(sample, W).forEach((mass, t) => {
      const line = document.createElement("div");
      line.className = "mass";
      const name = document.createElement("span");
      name.textContent = `token ${i + 1}.${t + 1}`;
      const track = document.createElement("span");
      track.className = "track";
      const fill = document.createElement("span");
      fill.className = "fill";
      fill.style.cssText = `width:${100 * mass}%;background:${colour(i)}`;
      track.append(fill);
      const number = document.createElement("span");
      number.textContent = `${(100 * mass).toFixed(1)} %`;
      line.append(name, track, number);
      bars.append(line);
    }));
    drawWeights(W, solution);
    drawDivergence();
  }

  function drawWeights(W, solution) {
    const svg = clear($("weights"));
    const size = Mirror.norm(W, state.p);
    const here = W.map((x) => (size > 0 ? x / size : 0));
    const goal = solution.status === "optimal" ? solution.W.map((x) => x / Mirror.norm(solution.W, state.p)) : null;
    element(svg, "line", { class: "axis", x1: 10, x2: 310, y1: 55, y2: 55 });
    ["W11", "W12", "W21", "W22"].forEach((name, k) => {
      const x = 30 + 75 * k;
      const bar = (offset, value, fill) => element(svg, "rect", {
        x: x + offset, width: 20, y: Math.min(55, 55 - 45 * value), height: Math.max(Math.abs(45 * value), 0.5), fill,
      });
      bar(0, here[k], "var(--accent)");
      if (goal) bar(24, goal[k], "var(--soft)");
      element(svg, "text", { class: "small", x: x + 22, y: 114, "text-anchor": "middle" }, name);
    });
    element(svg, "text", { class: "small", x: 310, y: 10, "text-anchor": "end" }, "blue: W(k), grey: solution");
  }

  function drawDivergence() {
    const svg = clear($("divergence"));
    const points = [];
    for (let k = 1; k < result.path.length; k = Math.max(k + 1, Math.round(k * 1.04))) {
      const D = divergenceAt(k);
      if (D > 0) points.push([k, D]);
    }
    if (points.length === 0) {
      element(svg, "text", { x: 160, y: 90, "text-anchor": "middle" }, "There is no solution to compare with.");
      return;
    }
    const low = Math.floor(Math.log10(Math.min(...points.map((point) => point[1]))));
    const high = Math.max(Math.ceil(Math.log10(Math.max(...points.map((point) => point[1])))), low + 1);
    const x = (k) => 45 + (265 * Math.log10(k)) / Math.log10(LIMITS.steps);
    const y = (D) => 160 - (150 * (Math.log10(D) - low)) / (high - low);
    for (let e = low; e <= high; e++) {
      element(svg, "line", { class: "grid", x1: 45, x2: 310, y1: y(10 ** e), y2: y(10 ** e) });
      const every = Math.ceil((high - low) / 6);
      if ((e - low) % every === 0) element(svg, "text", { class: "small", x: 40, y: y(10 ** e) + 3, "text-anchor": "end" }, `1e${e}`);
    }
    for (const k of [1, 10, 100, 1000]) element(svg, "text", { class: "small", x: x(k), y: 174, "text-anchor": "middle" }, String(k));
    element(svg, "text", { class: "small", x: 310, y: 186, "text-anchor": "end" }, "step k");
    element(svg, "polyline", { class: "line", points: points.map(([k, D]) => `${x(k)},${y(D)}`).join(" ") });
    const D = divergenceAt(time);
    if (time > 0 && D > 0) element(svg, "circle", { cx: x(time), cy: y(D), r: 5, fill: "var(--accent)" });
  }

  function play(on) {
    clearInterval(timer);
    timer = null;
    if (on) {
      if (time >= result.path.length - 1) time = 0;
      timer = setInterval(() => {
        time = Math.min(time + Math.max(1, Math.round(time * 0.05)), result.path.length - 1);
        drawPath();
        if (time >= result.path.length - 1) play(false);
      }, 40);
    }
    $("play").textContent = on ? "Pause" : "Play";
    $("play").setAttribute("aria-pressed", String(on));
  }

  // -- Python -------------------------------------------------------------------------------------------

  /** The lines that make the same problem with the library and print the same numbers. */
  function python() {
    const { samples, heads, p, head, source } = state;
    const most = Math.max(...samples.map((s) => s.tokens.length));
    const padded = samples.map((s) => [...s.tokens, ...Array(most - s.tokens.length).fill([0, 0])]);
    const ragged = samples.some((s) => s.tokens.length < most);
    const several = heads.length > 1;
    const value = p === Infinity ? "math.inf" : JSON.stringify(p);
    const mask = samples.map((s) => padded[0].map((_, t) => (t < s.tokens.length ? "True" : "False")));
    const extra = (ragged ? ", mask=mask" : "") + (several ? `, heads=${heads.length}` : "");
    const tokens = source === "scores" ? "mh.globally_optimal_tokens(problem)" : "path.tokens";
    return [
      ...(p === Infinity ? ["import math", ""] : []),
      "import torch",
      "import mirrorhead as mh",
      "",
      `X = torch.tensor(${JSON.stringify(padded)}, dtype=torch.float64)`,
      `z = torch.tensor(${JSON.stringify(samples.map((s) => s.z))}, dtype=torch.float64)`,
      `y = torch.tensor(${JSON.stringify(samples.map((s) => s.y))}, dtype=torch.float64)`,
      `v = torch.tensor(${JSON.stringify(several ? heads : heads[0])}, dtype=torch.float64)`,
      ...(ragged ? [`mask = torch.tensor([${mask.map((row) => `[${row.join(", ")}]`).join(", ")}])`] : []),
      `problem = mh.AttentionProblem(X, z, y, v${extra})`,
      `path = mh.descend(problem, ${JSON.stringify(result.pathP)}, steps=${LIMITS.steps}, progress=False)`,
      `tokens = ${tokens}${several ? `[${head}]` : ""}`,
      `solution = mh.attention_svm(X, z, tokens, ${value}${ragged ? ", mask=mask" : ""})`,
      'print("tokens:", tokens.tolist())',
      'print("status:", solution.status)',
      'print("norm:", float(solution.norm))',
      'print("W:", solution.W.flatten().tolist())',
    ].join("\n");
  }

  // -- controls -----------------------------------------------------------------------------------------

  const sliderOf = (p) => Math.round((1000 * Math.log(p / P_MIN)) / Math.log(P_MAX / P_MIN));
  const pOf = (slider) => Number((P_MIN * (P_MAX / P_MIN) ** (slider / 1000)).toPrecision(3));

  function controls() {
    $("p-value").textContent = exponent(state.p);
    $("p").value = String(sliderOf(Math.min(Math.max(state.p, P_MIN), P_MAX)));
    $("p").setAttribute("aria-valuetext", `p = ${exponent(state.p)}`);
    $("source").value = state.source;
    $("head-row").hidden = state.heads.length === 1;
    $("head-row").style.display = state.heads.length === 1 ? "none" : "";
    const choice = clear($("head"));
    state.heads.forEach((_, h) => choice.add(new Option(`head ${h + 1}`, String(h))));
    choice.value = String(state.head);
  }

  const message = (text) => { $("message").textContent = text; };

  async function copy(text, what) {
    try {
      await navigator.clipboard.writeText(text);
      message(`${what} copied.`);
    } catch {
      message(`The browser did not allow copying. ${what}: ${text}`);
    }
  }

  function setP(p) {
    state.p = p;
    $("preset").value = "";
    controls();
    update(true);
  }

  function start() {
    $("preset").add(new Option("your own", ""));
    Object.keys(PRESETS).forEach((name) => $("preset").add(new Option(name, name)));
    $("preset").addEventListener("change", (event) => {
      if (event.target.value) load(clone(PRESETS[event.target.value]));
    });
    $("p").addEventListener("input", (event) => setP(pOf(Number(event.target.value))));
    $("p-one").addEventListener("click", () => setP(1));
    $("p-infinity").addEventListener("click", () => setP(Infinity));
    $("source").addEventListener("change", (event) => { state.source = event.target.value; update(true); });
    $("head").addEventListener("change", (event) => { state.head = Number(event.target.value); update(true); });
    $("play").addEventListener("click", () => play(timer === null));
    $("step").addEventListener("click", () => { play(false); time = Math.min(time + 1, result.path.length - 1); drawPath(); });
    $("restart").addEventListener("click", () => { play(false); time = 0; drawPath(); });
    $("time").addEventListener("input", (event) => { play(false); time = Math.min(Number(event.target.value), result.path.length - 1); drawPath(); });
    $("add-sample").addEventListener("click", () => {
      if (state.samples.length >= LIMITS.samples) { message(`${LIMITS.samples} samples are the most.`); return; }
      const r = 0.5 * view;
      state.samples.push({ tokens: [[r, r], [-r, r], [0, -r]], z: [r, 0], y: 1 });
      update(true);
    });
    $("copy-link").addEventListener("click", () => {
      location.hash = encode(plain());
      copy(location.href, "Link");
    });
    $("copy-python").addEventListener("click", () => copy(python(), "Python lines"));
    $("save").addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([JSON.stringify(plain(), null, 1)], { type: "application/json" }));
      link.download = "playground.json";
      link.click();
      URL.revokeObjectURL(link.href);
    });
    $("open").addEventListener("change", async (event) => {
      const file = event.target.files[0];
      if (file) attempt(async () => load(JSON.parse(await file.text())), `${file.name} is not a state of this page`);
    });
    window.addEventListener("hashchange", fromLink);
    dragging();
    $("preset").value = Object.keys(PRESETS)[3];
    load(clone(PRESETS[$("preset").value]));
    fromLink();
  }

  async function attempt(action, complaint) {
    try { await action(); message(""); } catch (error) { message(`${complaint}: ${error.message}`); }
  }

  function fromLink() {
    const text = location.hash.slice(1);
    if (!text || text === encode(plain())) return;
    attempt(() => { load(decode(text)); $("preset").value = ""; }, "The link does not hold a state of this page");
  }

  return { start, python, compute, get state() { return plain(); }, get result() { return result; } };
})();

Playground.start();
