/* The mathematics of the playground: lp-AttSVM and lp-AttGD for tokens in the plane.
 *
 * A problem is { samples: [{ tokens: [[x, y], ...], z: [x, y], y: 1 | -1 }], heads: [[vx, vy], ...] }.
 * The model is f = sum over heads h of v_h' X' softmax(X W_h z); each W_h is 2 x 2, stored by rows
 * as [W11, W12, W21, W22]. lab/tests/test_playground.py compares everything here with the library.
 */
"use strict";

const Mirror = (() => {
  const TOLERANCE = 1e-8; // nothing is called optimal whose relative gap is above this

  const signedPower = (x, power) => Math.sign(x) * Math.abs(x) ** power;
  const dot = (a, b) => a.reduce((sum, value, k) => sum + value * b[k], 0);
  const dot4 = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
  const dual = (p) => (p === 1 ? Infinity : p === Infinity ? 1 : p / (p - 1));

  /** ||w||_p, scaled by the largest entry so that nothing overflows. */
  function norm(w, p) {
    const largest = Math.max(...w.map(Math.abs));
    if (largest === 0 || p === Infinity) return largest;
    return largest * w.reduce((sum, x) => sum + (Math.abs(x) / largest) ** p, 0) ** (1 / p);
  }

  /** D(target, w) of the directions: 1 - <mirror(w), target>, a sum of non-negative terms. */
  function divergence(target, w, p) {
    const a = target.map((x) => x / norm(target, p));
    const b = w.map((x) => x / norm(w, p));
    let sum = 0;
    for (let k = 0; k < a.length; k++) {
      sum += Math.abs(a[k]) ** p / p - Math.abs(b[k]) ** p / p
        - signedPower(b[k], p - 1) * (a[k] - b[k]);
    }
    return Math.max(sum, 0);
  }

  /** Scores y_i v_h' x_it, [head][sample][token]. */
  const scores = ({ samples, heads }) => heads.map((v) =>
    samples.map((s) => s.tokens.map((x) => s.y * dot(v, x))));

  /** The token with the highest score in each sample, for one head. */
  const bestTokens = (problem, head = 0) =>
    scores(problem)[head].map((g) => g.indexOf(Math.max(...g)));

  const logits = (sample, W) => {
    const h = direction(W, sample.z);
    return sample.tokens.map((x) => dot(x, h));
  };

  /** W z: tokens are compared along this direction. */
  const direction = (W, z) => [W[0] * z[0] + W[1] * z[1], W[2] * z[0] + W[3] * z[1]];

  function attention(sample, W) {
    const l = logits(sample, W);
    const top = Math.max(...l);
    const e = l.map((x) => Math.exp(x - top));
    const sum = e.reduce((a, b) => a + b, 0);
    return e.map((x) => x / sum);
  }

  const selected = (problem, W) => problem.samples.map((sample) => {
    const l = logits(sample, W);
    return l.indexOf(Math.max(...l));
  });

  // -- lp-AttSVM ------------------------------------------------------------------------------

  /** Rows a with a' vec(W) >= 1: (x_alpha - x_t) z', one for each token t that is not alpha. */
  function constraints(problem, tokens) {
    const rows = [];
    problem.samples.forEach((sample, i) => {
      const alpha = sample.tokens[tokens[i]];
      sample.tokens.forEach((x, t) => {
        if (t === tokens[i]) return;
        const d = [alpha[0] - x[0], alpha[1] - x[1]];
        const row = [d[0] * sample.z[0], d[0] * sample.z[1], d[1] * sample.z[0], d[1] * sample.z[1]];
        rows.push({ row, sample: i, token: t });
      });
    });
    return rows;
  }

  /** min ||W||_p such that all margins are at least 1, with a certificate.
   *
   * Returns { status, W, norm, gap, dual }: `gap` bounds the relative error of the norm, from
   * ||W||_p >= sum(dual) / ||A' dual||_q for any dual >= 0. Where no W exists the status is
   * "infeasible", and `dual` >= 0 has the sum 1 and A' dual = 0 (Farkas).
   */
  function attentionSvm(problem, tokens, p) {
    const list = constraints(problem, tokens);
    const A = list.map((c) => c.row);
    if (A.length === 0) {
      return { status: "optimal", W: [0, 0, 0, 0], norm: 0, gap: 0, dual: [], list };
    }
    const start = linearProgram(A, Infinity);
    if (start.status === "infeasible") {
      return { status: "infeasible", W: null, norm: NaN, gap: NaN, dual: start.dual, list };
    }
    let answer;
    if (p === 1 || p === Infinity) answer = p === 1 ? linearProgram(A, 1) : start;
    else {
      // Scale the rows so that the largest entry of the solution is about 1.
      const scale = Math.max(...start.w.map(Math.abs));
      const B = A.map((a) => a.map((x) => x * scale));
      const begin = start.w.map((x) => x / scale);
      const rough = p >= 2 ? primalBarrier(B, p, begin) : dualBarrier(B, p);
      const fine = polish(B, p, rough);
      answer = { w: fine.w.map((x) => x * scale), dual: fine.dual };
    }
    const solution = certify(A, p, answer);
    return { status: solution.gap <= TOLERANCE ? "optimal" : "unfinished", list, ...solution };
  }

  /** Make W feasible by scaling, and bound its norm from below by the dual. */
  function certify(A, p, { w, dual: lambda }) {
    const least = Math.min(...A.map((a) => dot4(a, w)));
    if (!(least > 0)) return { W: w, norm: Infinity, gap: Infinity, dual: lambda };
    const W = w.map((x) => x / least);
    const upper = norm(W, p);
    const lower = lambda.reduce((a, b) => a + b, 0) / norm(combine(A, lambda), dual(p));
    return { W, norm: upper, gap: Math.max(upper / lower - 1, 0), dual: lambda };
  }

  /** A' lambda. */
  function combine(A, lambda) {
    const s = [0, 0, 0, 0];
    A.forEach((a, k) => { for (let j = 0; j < 4; j++) s[j] += lambda[k] * a[j]; });
    return s;
  }

  /** Minimise (1/p)||w||_p^p - mu sum log(A w - 1) for falling mu; p >= 2, where this is smooth. */
  function primalBarrier(A, p, feasible) {
    let w = feasible.map((x) => 2 * x); // all margins are at least 2
    let lambda;
    const value = (x, mu) => {
      let sum = 0;
      for (const xi of x) sum += Math.abs(xi) ** p / p;
      for (const a of A) {
        const slack = dot4(a, x) - 1;
        if (!(slack > 0)) return Infinity;
        sum -= mu * Math.log(slack);
      }
      return sum;
    };
    for (let mu = 1; mu > 1e-12; mu *= 0.1) {
      for (let k = 0; k < 40; k++) {
        const g = w.map((x) => signedPower(x, p - 1));
        const H = diagonal(w.map((x) => (p - 1) * Math.abs(x) ** (p - 2) + 1e-300));
        const slack = A.map((a) => dot4(a, w) - 1);
        A.forEach((a, i) => {
          addOuter(H, mu / slack[i] ** 2, a);
          for (let j = 0; j < 4; j++) g[j] -= (mu / slack[i]) * a[j];
        });
        const move = newton(H, g);
        const decrease = -dot4(g, move);
        // The multipliers after this step, to first order: they satisfy A' lambda = mirror(w) best.
        lambda = A.map((a, i) => Math.max((mu / slack[i]) * (1 - dot4(a, move) / slack[i]), 0));
        if (!(decrease > 1e-5 * mu)) break;
        w = lineSearch((x) => value(x, mu), w, move, decrease);
      }
    }
    return { w, dual: lambda };
  }

  /** Minimise (1/q)||A' l||_q^q - sum l - mu sum log l for falling mu; q > 2, where this is smooth. */
  function dualBarrier(A, p) {
    const q = dual(p);
    let l = A.map(() => 0.1 / A.length);
    const value = (x, mu) => {
      let sum = 0;
      for (const s of combine(A, x)) sum += Math.abs(s) ** q / q;
      for (const y of x) {
        if (!(y > 0)) return Infinity;
        sum -= y + mu * Math.log(y);
      }
      return sum;
    };
    for (let mu = 1; mu > 1e-12; mu *= 0.1) {
      for (let k = 0; k < 60; k++) {
        const s = combine(A, l);
        const w = s.map((x) => signedPower(x, q - 1));
        const D = s.map((x) => (q - 1) * Math.abs(x) ** (q - 2));
        const g = A.map((a, i) => dot4(a, w) - 1 - mu / l[i]);
        const B = A.map((a) => a.map((x, c) => x * D[c]));
        const H = A.map((a, i) => B.map((b, j) => dot4(a, b) + (i === j ? mu / l[i] ** 2 : 0)));
        const move = newton(H, g);
        const decrease = -dot(g, move);
        if (!(decrease > 1e-5 * mu)) break;
        l = lineSearch((x) => value(x, mu), l, move, decrease);
      }
    }
    return { w: combine(A, l).map((s) => signedPower(s, q - 1)), dual: l };
  }

  /** Solve the optimality conditions with the active constraints as equations, if that is better.
   *
   * Barriers are exact to about 1e-12 in the objective, which says little about small entries of
   * w. Newton's method works on the smooth side of the link between w and its multipliers l:
   * A (A' l)^(q-1) = 1 for p < 2; mirror(w) = A' l and A w = 1 for p >= 2. At most four
   * constraints are needed: those with the largest multipliers, and for large p, where multipliers
   * can be as small as 1e-12, other likely ones.
   */
  function polish(A, p, rough) {
    const slack = A.map((a) => dot4(a, rough.w) - 1);
    const all = A.map((_, k) => k);
    const byDual = [...all].sort((i, j) => rough.dual[j] - rough.dual[i]);
    const bySlack = [...all].sort((i, j) => slack[i] - slack[j]);
    let best = rough;
    let gap = certify(A, p, rough).gap;
    const attempt = (active) => {
      const S = active.map((k) => A[k]);
      const start = active.map((k) => rough.dual[k]);
      const { w, l } = p < 2 ? polishDual(S, p, start) : polishPrimal(S, p, rough.w);
      const lambda = A.map(() => 0);
      active.forEach((k, i) => { lambda[k] = Math.max(l[i], 0); });
      const found = certify(A, p, { w, dual: lambda }).gap;
      if (found < gap) [best, gap] = [{ w, dual: lambda }, found];
      return gap < 1e-13;
    };
    for (let size = 1; size <= Math.min(4, A.length); size++) {
      if (attempt(byDual.slice(0, size))) return best;
    }
    if (gap < TOLERANCE) return best;
    const likely = [...new Set([...byDual.slice(0, 4), ...bySlack.slice(0, 4)])];
    for (const subset of subsets(likely, 4)) if (attempt(subset)) return best;
    return best;
  }

  /** The subsets of 1 to `most` items. */
  function subsets(items, most) {
    let found = [[]];
    for (const item of items) {
      found = found.concat(found.filter((s) => s.length < most).map((s) => [...s, item]));
    }
    return found.slice(1);
  }

  function polishDual(S, p, start) {
    const q = dual(p);
    const primal = (x) => combine(S, x).map((s) => signedPower(s, q - 1));
    const residual = (x) => { const w = primal(x); return S.map((a) => dot4(a, w) - 1); };
    const size = (r) => Math.max(...r.map(Math.abs));
    let l = start;
    let r = residual(l);
    for (let k = 0; k < 40 && size(r) > 1e-15; k++) {
      const D = combine(S, l).map((s) => (q - 1) * Math.abs(s) ** (q - 2));
      const J = S.map((a) => S.map((b) => a.reduce((sum, x, c) => sum + D[c] * x * b[c], 0)));
      const move = solve(J, r.map((x) => -x));
      if (move === null) break;
      const next = l.map((x, i) => x + move[i]);
      const rest = residual(next);
      if (!(size(rest) < size(r))) break;
      l = next;
      r = rest;
    }
    return { w: primal(l), l };
  }

  function polishPrimal(S, p, start) {
    const n = 4 + S.length;
    let w = start;
    let l = S.map(() => 0);
    for (let k = 0; k < 60; k++) {
      const M = Array.from({ length: n }, () => Array(n).fill(0));
      const right = Array(n).fill(0);
      for (let j = 0; j < 4; j++) {
        M[j][j] = (p - 1) * Math.abs(w[j]) ** (p - 2) + 1e-200;
        right[j] = -signedPower(w[j], p - 1);
      }
      S.forEach((a, i) => {
        for (let j = 0; j < 4; j++) { M[j][4 + i] = -a[j]; M[4 + i][j] = a[j]; }
        right[4 + i] = 1 - dot4(a, w);
      });
      const answer = solve(M, right);
      if (answer === null || !answer.every(Number.isFinite)) break;
      l = answer.slice(4);
      w = w.map((x, j) => x + answer[j]);
      if (Math.max(...answer.slice(0, 4).map(Math.abs)) < 1e-15) break;
    }
    return { w, l };
  }

  /** p = 1 or p = infinity as a linear program, by the dual simplex method (Bland's rule).
   *
   * min c'x with G x >= h and x >= 0, where c >= 0 makes the slack basis dual feasible:
   * p = 1: w = x+ - x-, c = 1. p = infinity: w = x - t 1 with 0 <= x <= 2 t, c picks t.
   */
  function linearProgram(A, p) {
    const size = Math.max(...A.map((a) => Math.max(...a.map(Math.abs)))) || 1;
    const rows = A.map((a) => a.map((x) => x / size));
    let G;
    let c;
    let h;
    if (p === 1) {
      G = rows.map((a) => [...a, ...a.map((x) => -x)]);
      c = Array(8).fill(1);
      h = rows.map(() => 1);
    } else {
      const box = [0, 1, 2, 3].map((j) => [0, 1, 2, 3].map((k) => (j === k ? -1 : 0)).concat(2));
      G = rows.map((a) => [...a, -a.reduce((x, y) => x + y, 0)]).concat(box);
      c = [0, 0, 0, 0, 1];
      h = [...rows.map(() => 1), 0, 0, 0, 0];
    }
    const n = c.length;
    const m = G.length;
    // Row i: basic variable + sum of T[i][j] nonbasic_j = T[i][n].
    const T = G.map((g, i) => [...g.map((x) => -x), -h[i]]);
    const cost = [...c, 0];
    const nonbasic = c.map((_, j) => j);
    const basic = G.map((_, i) => n + i);
    for (let count = 0; count < 5000; count++) {
      let row = -1;
      for (let i = 0; i < m; i++) {
        if (T[i][n] < -1e-11 && (row < 0 || basic[i] < basic[row])) row = i;
      }
      if (row < 0) break;
      let column = -1;
      let best = Infinity;
      for (let j = 0; j < n; j++) {
        if (T[row][j] < -1e-11) {
          const ratio = cost[j] / -T[row][j];
          if (ratio < best - 1e-13 || (ratio < best + 1e-13 && nonbasic[j] < nonbasic[column])) {
            best = ratio;
            column = j;
          }
        }
      }
      if (column < 0) {
        // The row says: a non-negative combination of the constraints reads 0 >= positive.
        const y = G.map(() => 0);
        if (basic[row] >= n) y[basic[row] - n] = 1;
        nonbasic.forEach((variable, j) => { if (variable >= n) y[variable - n] = T[row][j]; });
        const weights = y.slice(0, A.length).map((x) => Math.max(x, 0));
        const sum = weights.reduce((a, b) => a + b, 0);
        return { status: "infeasible", w: null, dual: weights.map((x) => x / sum) };
      }
      pivot(T, cost, row, column);
      [basic[row], nonbasic[column]] = [nonbasic[column], basic[row]];
    }
    const x = c.map(() => 0);
    basic.forEach((variable, i) => { if (variable < n) x[variable] = T[i][n]; });
    const y = G.map(() => 0);
    nonbasic.forEach((variable, j) => { if (variable >= n) y[variable - n] = Math.max(cost[j], 0); });
    const w = p === 1 ? [0, 1, 2, 3].map((j) => x[j] - x[j + 4]) : [0, 1, 2, 3].map((j) => x[j] - x[4]);
    return { status: "optimal", w: w.map((value) => value / size), dual: y.slice(0, A.length) };
  }

  /** Exchange the basic variable of a row with the nonbasic one of a column. */
  function pivot(T, cost, row, column) {
    const n = cost.length - 1;
    const by = T[row][column];
    for (let j = 0; j <= n; j++) T[row][j] = j === column ? 1 / by : T[row][j] / by;
    for (const other of [...T, cost]) {
      if (other === T[row]) continue;
      const factor = other[column];
      if (factor === 0) continue;
      for (let j = 0; j <= n; j++) {
        if (j === column) other[j] = -factor * T[row][j];
        else other[j] -= factor * T[row][j];
      }
    }
  }

  // -- small linear algebra ---------------------------------------------------------------------

  const diagonal = (d) => d.map((x, i) => d.map((_, j) => (i === j ? x : 0)));

  /** H + weight a a', in place. */
  function addOuter(H, weight, a) {
    for (let i = 0; i < 4; i++) for (let j = 0; j < 4; j++) H[i][j] += weight * a[i] * a[j];
  }

  /** -H^-1 g, by Gauss with pivoting after scaling H to a unit diagonal. */
  function newton(H, g) {
    const scale = H.map((row, i) => 1 / Math.sqrt(row[i]));
    const scaled = H.map((row, i) => row.map((x, j) => x * scale[i] * scale[j]));
    const x = solve(scaled, g.map((y, i) => -y * scale[i]));
    return x === null ? g.map((y, i) => -y * scale[i] ** 2) : x.map((y, i) => y * scale[i]);
  }

  function solve(matrix, right) {
    const n = right.length;
    const M = matrix.map((row, i) => [...row, right[i]]);
    for (let k = 0; k < n; k++) {
      let best = k;
      for (let i = k + 1; i < n; i++) if (Math.abs(M[i][k]) > Math.abs(M[best][k])) best = i;
      if (!(Math.abs(M[best][k]) > 1e-280)) return null;
      [M[k], M[best]] = [M[best], M[k]];
      for (let i = k + 1; i < n; i++) {
        const factor = M[i][k] / M[k][k];
        for (let j = k; j <= n; j++) M[i][j] -= factor * M[k][j];
      }
    }
    const x = Array(n).fill(0);
    for (let i = n - 1; i >= 0; i--) {
      let sum = M[i][n];
      for (let j = i + 1; j < n; j++) sum -= M[i][j] * x[j];
      x[i] = sum / M[i][i];
    }
    return x;
  }

  /** Armijo: halve the step until the function falls by a tenth of what Newton promises. */
  function lineSearch(f, x, move, decrease) {
    const before = f(x);
    for (let step = 1; step > 1e-12; step /= 2) {
      const next = x.map((value, i) => value + step * move[i]);
      if (f(next) <= before - 0.1 * step * decrease) return next;
    }
    return x;
  }

  // -- lp-AttGD ---------------------------------------------------------------------------------

  /** The direction of the gradient of the logistic loss for each head, over a common scale.
   *
   * Softmax weights other than the selected token's are kept relative to the largest of them, and
   * their size as a logarithm: the direction stays exact when attention is one-hot to 300 digits.
   */
  function gradient(problem, weights, g = scores(problem)) {
    const { samples, heads } = problem;
    const parts = samples.map((sample, i) => {
      const perHead = heads.map((_, h) => {
        const l = logits(sample, weights[h]);
        const alpha = l.indexOf(Math.max(...l));
        const others = l.map((x, t) => (t === alpha ? -Infinity : x - l[alpha]));
        const logTail = Math.max(Math.max(...others), -Number.MAX_VALUE);
        const rest = others.map((x) => Math.exp(x - logTail));
        const tail = Math.exp(logTail);
        const excess = tail * rest.reduce((a, b) => a + b, 0);
        const gap = g[h][i].map((x) => g[h][i][alpha] - x);
        const shortfall = dot(rest, gap) / (1 + excess);
        return { alpha, logTail, rest, tail, excess, gap, shortfall, best: g[h][i][alpha] };
      });
      const margin = perHead.reduce((sum, x) => sum + x.best - x.tail * x.shortfall, 0);
      const logSlope = margin > 0 ? -margin - Math.log1p(Math.exp(-margin)) : -Math.log1p(Math.exp(margin));
      return perHead.map((x) => ({ ...x, logScale: logSlope + x.logTail - Math.log1p(x.excess) }));
    });
    const largest = Math.max(...parts.flat().map((x) => x.logScale));
    return heads.map((_, h) => {
      const G = [0, 0, 0, 0];
      samples.forEach((sample, i) => {
        const { alpha, rest, tail, gap, shortfall, logScale } = parts[i][h];
        const pull = rest.map((r, t) => r * (tail * shortfall - gap[t]));
        pull[alpha] = 0;
        pull[alpha] = -pull.reduce((a, b) => a + b, 0);
        const share = -Math.exp(logScale - largest) / samples.length;
        for (let a = 0; a < 2; a++) {
          const row = share * pull.reduce((sum, x, t) => sum + x * sample.tokens[t][a], 0);
          for (let b = 0; b < 2; b++) G[2 * a + b] += row * sample.z[b];
        }
      });
      return G;
    });
  }

  /** Normalised lp-AttGD from zero: u+ = u - lr grad / ||grad||_q, W = inverse(u).
   *
   * Returns the weights after 0, 1, ..., steps: [step][head] = [W11, W12, W21, W22].
   */
  function descend(problem, p, steps, lr = 0.1) {
    const q = dual(p);
    const power = 1 / (p - 1);
    const g = scores(problem);
    let u = problem.heads.map(() => [0, 0, 0, 0]);
    const path = [u.map((x) => x.slice())];
    for (let k = 0; k < steps; k++) {
      const G = gradient(problem, path[k], g);
      const size = norm(G.flat(), q);
      if (size > 0) u = u.map((x, h) => x.map((value, j) => value - lr * (G[h][j] / size)));
      path.push(u.map((x) => x.map((value) => signedPower(value, power))));
    }
    return path;
  }

  /** Definition 3: every support token of the solution scores below the selected one. */
  function locallyOptimal(problem, tokens, solution, head = 0) {
    if (solution.status !== "optimal") return null;
    const g = scores(problem)[head];
    return supportTokens(solution).every(({ sample, token }) =>
      g[sample][token] < g[sample][tokens[sample]]);
  }

  /** Tokens whose constraint is active. */
  const supportTokens = (solution, tolerance = 1e-6) => solution.status !== "optimal" ? []
    : solution.list.filter((c) => dot(c.row, solution.W) <= 1 + tolerance);

  return {
    attention, attentionSvm, bestTokens, constraints, descend, direction, divergence, dual,
    gradient, locallyOptimal, logits, norm, scores, selected, supportTokens,
  };
})();

if (typeof module !== "undefined") module.exports = Mirror;
