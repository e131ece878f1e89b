// Several runs side by side: a table of what their stages have cost, and a line of each in every chart.
"use strict";
(() => {
  const { byId, el, count, size, duration, figure, fill } = Dash;
  const names = new URLSearchParams(location.search).getAll("name");
  let chosen = "", ask = () => {};
  const query = names.map((name) => `name=${encodeURIComponent(name)}`).join("&");
  const COLUMNS = [
    ["run", "text"], ["status", "text"], ["method", "text"], ["stage", "text"], ["rounds"], ["time"], ["up"], ["down"], ["held-out"],
  ];

  function show(content) {
    fill(byId("costs"), COLUMNS, content.runs.map((run) => {
      const link = el("a", run.run), [stage, method, rounds] = run.newest || ["-", "-", null];
      link.href = `run?name=${encodeURIComponent(run.run)}`;
      return [
        link, run.status, method, stage, count(rounds), duration(run.stage_s), size(run.stage_up), size(run.stage_down), figure(run.metric),
      ];
    }), content.runs);
    byId("curves").hidden = !content.charts.length;
    Dash.tabs(byId("figures"), content.figures, content.figure, (value) => {
      chosen = value;
      ask();
    });
    Charts.show(byId("charts"), content.charts.map((chart) => ({ ...chart, slot: chart.key.replace(`${content.figure}-`, "progress-") })));
  }

  const address = () => `api/compare?${query}${chosen ? `&figure=${encodeURIComponent(chosen)}` : ""}`;
  ask = Dash.follow(address, show, (content) => (content.runs.some((run) => run.is_under_way) ? 2 : 10));
})();
