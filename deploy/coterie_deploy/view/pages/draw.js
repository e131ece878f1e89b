// Draws every .chart[data-key] from the specifications in #charts, in the colours of the page, and again when these or the width change.
"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const views = new Map();
  let specs = JSON.parse((document.getElementById("charts") || { textContent: "{}" }).textContent);

  async function draw(place) {
    const spec = specs[place.dataset.key];
    if (!spec || place.clientWidth === 0) return;
    const config = dark.matches ? themes.dark : themes.light;
    const options = { actions: false, renderer: "svg", logLevel: 1, config, tooltip: { theme: "custom" } };
    const before = views.get(place);
    const made = await vegaEmbed(place, spec, options);
    if (before) before.finalize();
    views.set(place, made);
    place.querySelector("svg")?.setAttribute("aria-label", place.dataset.label || "");
  }
  const fail = (error) => console.error(error);
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      draw(entry.target).catch(fail);
    }
  }, { rootMargin: "300px" });
  const watch = (root) => root.querySelectorAll(".chart[data-key]").forEach((place) => seen.observe(place));
  const again = () => [...views.keys()].filter((place) => !place.closest("[hidden]")).forEach((place) => draw(place).catch(fail));

  dark.addEventListener("change", again);
  document.addEventListener("change", (event) => {
    const chosen = event.target;
    if (!chosen.matches("fieldset.tabs input")) return;
    for (const panel of document.querySelectorAll(`[data-tab^="${chosen.name}:"]`)) {
      panel.hidden = panel.dataset.tab !== `${chosen.name}:${chosen.value}`;
      for (const place of panel.querySelectorAll(".chart")) if (views.has(place)) draw(place).catch(fail); // the width may have changed
    }
  });
  // Paper shows all tabs and does not wait: what nobody has looked at is drawn when there is time, and at the latest before printing.
  const undrawn = () => [...document.querySelectorAll(".chart[data-key]")].filter((place) => !views.has(place));
  const ahead = () => {
    const next = undrawn().find((place) => specs[place.dataset.key] && place.clientWidth > 0);
    if (next) draw(next).catch(fail).then(() => requestIdleCallback(ahead));
  };
  window.addEventListener("load", () => requestIdleCallback(ahead));
  window.addEventListener("beforeprint", () => undrawn().forEach((place) => draw(place).catch(fail)));
  window.coterie = {
    watch,
    replace: (changed) => { specs = { ...specs, ...changed }; again(); },
  };
  watch(document);
})();
