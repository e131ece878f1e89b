// Draws charts that change: a new one is drawn beside the one that is seen, which it then replaces, so that nothing flickers or jumps.
"use strict";
const Charts = (() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const cards = new Map();  // by key: { card, title, note, place, spec, drawn, view }

  async function draw(one) {
    if (one.busy || one.place.clientWidth === 0) return;
    const wanted = JSON.stringify([dark.matches, one.spec]);
    if (one.drawn === wanted) return;
    one.busy = true;
    const layer = document.createElement("div");
    layer.className = "layer";
    one.place.append(layer);
    try {
      const config = dark.matches ? themes.dark : themes.light;
      const options = { actions: false, ast: true, renderer: "svg", logLevel: 1, config, tooltip: { theme: "custom" } };
      const view = await vegaEmbed(layer, one.spec, options);
      if (one.view) one.view.finalize();
      one.place.replaceChildren(layer);
      layer.classList.add("seen");
      layer.querySelector("svg")?.setAttribute("aria-label", one.title.textContent);
      Object.assign(one, { view, drawn: wanted });
    } catch (error) {
      layer.remove();
      console.error(error);
    }
    one.busy = false;
    if (one.drawn !== JSON.stringify([dark.matches, one.spec]) && layer.isConnected) draw(one);
  }

  function made(grid) {
    const [card, title, note, place] = ["figure", "h3", "div", "div"].map((tag) => document.createElement(tag));
    card.className = "card";
    note.className = "note";
    place.className = "chart live";
    place.setAttribute("role", "img");
    card.append(title, note, place);
    grid.append(card);
    return { card, title, note, place };
  }

  function show(grid, charts) {
    const keys = new Set(charts.map((chart) => chart.slot));
    for (const [slot, one] of cards) {
      if (keys.has(slot)) continue;
      if (one.view) one.view.finalize();
      one.card.remove();
      cards.delete(slot);
    }
    for (const chart of charts) {
      const one = cards.get(chart.slot) || made(grid);
      cards.set(chart.slot, one);
      grid.append(one.card);  // in this order
      one.card.dataset.key = chart.key;
      one.title.textContent = chart.title;
      one.note.textContent = chart.note;
      one.place.setAttribute("aria-label", `${chart.title}: ${chart.note}`);
      one.spec = chart.spec;
      draw(one);
    }
  }

  dark.addEventListener("change", () => cards.forEach(draw));
  return { show };
})();
