"use strict";
// Tokens are shaded by one of their numbers; all numbers are available by pointer and by keyboard.
(() => {
  const NAMES = ["logprob", "entropy", "ratio", "advantage", "credit"];
  const WORDS = { logprob: "log-prob", entropy: "entropy", ratio: "ratio", advantage: "advantage", credit: "credit" };
  const choice = document.getElementById("color");
  const reading = document.getElementById("reading");
  const scale = document.getElementById("scale");
  const all = [...document.querySelectorAll(".t")];
  const numbers = new Map(all.map((token) => [token, token.dataset.v.split(" ").map((word) => (word === "-" ? null : Number(word)))]));
  const short = (value) => {
    if (value === null) return "–";
    const size = Math.abs(value);
    return (size && (size < 1e-3 || size >= 1e5) ? value.toExponential(1) : String(Number(value.toPrecision(3)))).replace("-", "−");
  };
  // The shown values: surprise and entropy grow from 0; the other numbers are positive or negative.
  const strength = (name, value) => ({ logprob: -value, entropy: value, ratio: Math.log(Math.max(value, 1e-9)), advantage: value, credit: value })[name];
  const sided = { logprob: false, entropy: false, ratio: true, advantage: true, credit: true };

  const shade = () => {
    const name = choice.value;
    const at = NAMES.indexOf(name);
    const strengths = all.map((token) => { const value = numbers.get(token)[at]; return value === null ? null : strength(name, value); });
    const there = strengths.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
    const most = there.length ? there[Math.floor(0.98 * (there.length - 1))] || there.at(-1) || 1 : 1;
    const top = name === "ratio" ? Math.max(most, 0.01) : most; // a ratio within a hundredth of 1 is not remarkable
    all.forEach((token, k) => {
      const value = strengths[k];
      token.className = "t";
      if (value === null) return;
      const level = Math.min(6, Math.ceil((6 * Math.abs(value)) / top - 0.25));
      if (level > 0) token.classList.add(sided[name] && value < 0 ? `m${level}` : `p${level}`);
    });
    scale.textContent = !there.length ? "not recorded for this episode"
      : name === "logprob" ? `darker: less expected, down to ${short(-top)}`
      : name === "entropy" ? `darker: less certain, up to ${short(top)} nats`
      : name === "ratio" ? `blue, solid line: more likely after the update, up to ×${short(Math.exp(top))}; orange, dotted: less likely`
      : `blue, solid line: encouraged, up to ${short(top)}; orange, dotted: discouraged`;
    const query = new URLSearchParams(location.search);
    query.set("color", name);
    history.replaceState(null, "", `?${query}`);
  };

  const tell = (token) => {
    const values = numbers.get(token);
    reading.hidden = false;
    reading.replaceChildren();
    const word = document.createElement("b");
    word.textContent = token.textContent.replace(/\n/g, "⏎").replace(/ /g, "␣").slice(0, 60);
    reading.append(word, ` id ${token.dataset.id}`);
    NAMES.forEach((name, k) => {
      if (values[k] === null) return;
      const item = document.createElement("span");
      item.textContent = `${WORDS[name]} ${short(values[k])}`;
      if (name === "logprob") item.textContent += ` (${short(100 * Math.exp(values[k]))} %)`;
      reading.append(item);
    });
  };

  // The Tab key moves from turn to turn, and the arrow keys from token to token.
  for (const box of document.querySelectorAll("[data-tokens]")) {
    const own = [...box.querySelectorAll(".t")];
    if (own.length) own[0].tabIndex = 0;
    box.addEventListener("keydown", (event) => {
      const at = own.indexOf(event.target);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: own.length - 1 }[event.key];
      if (at < 0 || to === undefined || !own[to]) return;
      event.preventDefault();
      own[at].tabIndex = -1;
      own[to].tabIndex = 0;
      own[to].focus();
    });
  }
  document.addEventListener("pointerover", (event) => { if (event.target.classList?.contains("t")) tell(event.target); });
  document.addEventListener("focusin", (event) => { if (event.target.classList?.contains("t")) tell(event.target); });
  choice.addEventListener("change", shade);
  shade();
})();
