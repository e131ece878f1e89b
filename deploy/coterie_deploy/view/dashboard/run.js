// One run: how far it is, its curves, who is there, what was sent, what happened.
"use strict";
(() => {
  const { byId, el, count, counted, size, duration, figure, when, fill } = Dash;
  const name = new URLSearchParams(location.search).get("name") || "";
  const DOWNLOADS = [["report.html", "Report"], ["ledger.csv", "Ledger as CSV"], ["ledger.jsonl", "Ledger as JSON lines"], ["run.db", "Database"]];
  const wanted = { stage: "", figure: "" };
  let ask = () => {};

  byId("downloads").append(...DOWNLOADS.map(([what, title]) => {
    const link = el("a", title, "button");
    link.href = `download/${what}?name=${encodeURIComponent(name)}`;
    return link;
  }));
  byId("stages").addEventListener("change", (event) => {
    Object.assign(wanted, { stage: event.target.value, figure: "" });
    ask();
  });

  const address = () => {
    const chosen = Object.entries(wanted).filter(([, value]) => value).map(([key, value]) => `&${key}=${encodeURIComponent(value)}`);
    return `api/run?name=${encodeURIComponent(name)}${chosen.join("")}`;
  };

  function head(run) {
    const status = byId("status");
    Object.assign(status, { textContent: run.status, hidden: false, className: `status ${run.status}` });
    byId("name").textContent = name === "." ? run.name : name;
    const parts = [`experiment ${run.name}`, `run ${run.run_id}`];
    if (run.attempt > 1) parts.push(`attempt ${run.attempt}`);
    byId("headline").textContent = run.doing || parts.join(", ");
    if (run.sentence) Dash.say(run.sentence);
  }

  function progress(run) {
    byId("progress").hidden = !run.is_under_way || !run.newest;
    if (byId("progress").hidden) return;
    const [stage, , rounds] = run.newest;
    byId("stage-name").textContent = stage;
    Object.assign(byId("stage-bar"), { max: run.limit || 1, value: run.limit ? rounds : 0 });
    byId("stage-count").textContent = run.limit ? `${count(rounds)} of at most ${count(run.limit)}` : count(rounds);
    Object.assign(byId("all-bar"), { max: run.n_stages, value: run.n_done });
    byId("all-count").textContent = `${run.n_done} of ${run.n_stages}`;
    const parts = [];
    if (run.rounds_per_s) parts.push(`${run.rounds_per_s >= 10 ? run.rounds_per_s.toFixed(0) : run.rounds_per_s.toFixed(1)} rounds/s`);
    if (run.likely_s !== null) parts.push(`about ${duration(run.likely_s)} left`);
    if (run.left_s !== null) parts.push(`at most ${duration(run.left_s)}`);
    byId("pace").textContent = parts.join(", ");
  }

  function facts(run) {
    const latest = Object.entries(run.latest).filter(([key]) => ["objective", "loss", "accuracy", "squared_error", "deviance", "clusters", "distance"].includes(key));
    const metric = run.newest && run.newest[5] !== null ? [["held-out metric", figure(run.newest[5])]] : [];
    const listed = [
      ["method", run.newest ? run.newest[1] : ""], [run.status === "finished" ? "result" : "stage", run.newest ? run.newest[0] : ""],
      ["rounds of the stage", run.newest ? count(run.newest[2]) : ""], ...latest.map(([key, value]) => [key, key === "clusters" ? count(value) : figure(value)]), ...metric,
      ["users", run.n_users ? count(run.n_users) : ""], ["sent up", size(run.up)], ["sent down", size(run.down)],
    ];
    const text = JSON.stringify(listed);
    if (byId("facts").dataset.shown === text) return;
    byId("facts").dataset.shown = text;
    byId("facts").replaceChildren(...listed.filter(([, value]) => value !== "").map(([title, value]) => {
      const pair = el("div");
      pair.append(el("dt", title), el("dd", value));
      return pair;
    }));
  }

  function curves(run) {
    byId("curves").hidden = !run.charts.length;
    Dash.tabs(byId("figures"), run.figures, run.figure, (value) => {
      wanted.figure = value;
      ask();
    });
    const names = run.stages.map(([stage]) => stage), stages = byId("stages");
    if (stages.dataset.shown !== JSON.stringify(names)) {
      stages.dataset.shown = JSON.stringify(names);
      stages.replaceChildren(...names.map((stage) => Object.assign(el("option", stage), { value: stage })));
    }
    if (document.activeElement !== stages) stages.value = run.stage;
    // A slot keeps its place when another figure is drawn there.
    Charts.show(byId("charts"), run.charts.map((chart) => ({ ...chart, slot: chart.key.replace(`${run.figure}-`, "progress-") })));
  }

  function tables(run) {
    const n_here = run.members.filter(([, , isHere]) => isHere).length;
    const who = run.is_under_way ? `${n_here} of ${counted(run.n_wanted, run.noun)} here` : counted(run.members.length, run.noun);
    byId("members-note").textContent = run.members.length ? who : `no ${run.noun} has come yet`;
    const order = run.is_under_way ? [...run.members].sort((a, b) => a[2] - b[2]) : run.members;
    const state = (isHere, since) => (run.is_under_way ? `${isHere ? "here" : "absent"}${since === null ? "" : ` since ${when(since)}`}` : "took part");
    fill(byId("members"), [[run.noun, "text"], ["", "text"], ["users"]], order.map(([member, users, isHere, since]) => {
      const cell = el("span", state(isHere, since), run.is_under_way ? (isHere ? "here" : "absent") : "");
      return [member, cell, users ? count(users) : "-"];
    }), [order, run.is_under_way]);
    fill(byId("sent"), [["scope", "text"], ["way", "text"], ["vectors"], ["on the wire"], ...(run.is_under_way ? [["per second"]] : [])], run.sent.map(
      ([scope, way, vectors, bytes, rate]) => [scope, way, count(vectors), size(bytes), ...(run.is_under_way ? [rate ? size(rate) : "-"] : [])],
    ));
    fill(byId("events"), [["at", "text"], ["event", "text long"]], run.events.map(([at, , text]) => [when(at), text]));
    const isOver = (outcome) => outcome || (run.is_under_way ? "under way" : "not over");
    fill(byId("stage-list"), [["stage", "text"], ["ended by", "text"], ["rounds"], ["time"], ["clusters"], ["held-out"]], run.stages.map(
      ([stage, , rounds, outcome, seconds, metric, clusters]) => [
        stage, isOver(outcome), count(rounds), outcome ? duration(seconds) : "", clusters === null ? "" : count(clusters), metric === null ? "" : figure(metric),
      ],
    ));
  }

  ask = Dash.follow(address, (run) => [head, progress, facts, curves, tables].forEach((part) => part(run)), (run) => (run.is_under_way ? 1.5 : 10));
})();
