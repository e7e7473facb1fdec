// The token that is pointed at, or has the focus, shows its row of the chosen layer and head.
"use strict";
const { unit, texts } = JSON.parse(document.getElementById("content").textContent);
const layer = document.getElementById("layer");
const head = document.getElementById("head");

// Row `from` of the chosen map, as weights.
function row(text, from) {
  if (layer.value === "rollout") return text.rollout[from].map((w) => w * unit);
  const heads = text.maps[layer.value];
  const chosen = head.value === "mean" ? heads : [heads[head.value]];
  return text.tokens.map((_, to) =>
    chosen.reduce((sum, map) => sum + map[from][to], 0) * unit / chosen.length);
}

const repaints = [...document.querySelectorAll("article")].map((article, number) => {
  const text = texts[number];
  const tokens = [...article.querySelectorAll(".token")];
  const told = article.querySelector(".told");
  let looking = 0;

  function paint() {
    const weights = row(text, looking);
    const most = Math.max(...weights) || 1;
    tokens.forEach((token, to) => {
      token.style.setProperty("--weight", (weights[to] / most).toFixed(4));
      token.title = weights[to].toFixed(4);
      token.classList.toggle("looking", to === looking);
    });
    const best = weights.map((w, to) => [w, to]).sort((a, b) => b[0] - a[0]).slice(0, 5)
      .map(([w, to]) => `${text.tokens[to]} ${w.toFixed(3)}`).join(", ");
    const given = row(text, 0)[looking].toFixed(4);
    told.textContent = `${text.tokens[looking]} looks at ${best}.`
      + (looking ? ` [CLS] gives it ${given}.` : "");
  }

  function show(to) {
    looking = to;
    paint();
  }

  tokens.forEach((token, to) => {
    token.addEventListener("pointerenter", () => show(to));
    token.addEventListener("focus", () => {
      tokens.forEach((other) => { other.tabIndex = other === token ? 0 : -1; });
      show(to);
    });
    token.addEventListener("keydown", (event) => {
      const places = { ArrowRight: to + 1, ArrowLeft: to - 1, Home: 0, End: tokens.length - 1 };
      if (event.key === "Escape") show(0);
      if (!(event.key in places)) return;
      event.preventDefault();
      tokens[Math.min(Math.max(places[event.key], 0), tokens.length - 1)].focus();
    });
  });
  // Back to the token that has the focus, or to [CLS].
  article.addEventListener("pointerleave", () =>
    show(Math.max(tokens.indexOf(document.activeElement), 0)));
  article.addEventListener("focusout", (event) => {
    if (!article.contains(event.relatedTarget)) show(0);
  });
  return paint;
});

for (const choice of [layer, head]) {
  choice.addEventListener("change", () => {
    head.disabled = layer.value === "rollout";
    repaints.forEach((paint) => paint());
  });
}
repaints.forEach((paint) => paint());
