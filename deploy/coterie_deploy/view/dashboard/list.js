// The list of runs: sorted, filtered, chosen for a comparison.
"use strict";
(() => {
  const { byId, el, count, counted, size, when } = Dash;
  const COLUMNS = [
    ["run", "run", true], ["status", "status", true], ["method", "method", true], ["users", "users"], ["rounds", "rounds"],
    ["result", "result", true], ["wire_bytes", "on the wire"], ["started", "started"],
  ];
  const MOST = 12;
  const chosen = new Set();
  let runs = [], key = "started", isDown = true;

  const head = document.querySelector("#runs thead tr"), body = document.querySelector("#runs tbody");
  head.append(el("th"));
  for (const [name, title, isText] of COLUMNS) {
    const cell = el("th", undefined, isText ? "text" : ""), button = el("button", title, "sort");
    cell.scope = "col";
    cell.dataset.key = name;
    button.type = "button";
    button.addEventListener("click", () => sortBy(name, name === key ? !isDown : name !== "run"));
    cell.append(button);
    head.append(cell);
    for (const down of [true, false]) {
      const option = el("option", `${title} ${down ? "\u2193" : "\u2191"}`);
      option.value = `${name} ${down}`;
      byId("sort").append(option);
    }
  }
  byId("sort").addEventListener("change", (event) => {
    const [name, down] = event.target.value.split(" ");
    sortBy(name, down === "true");
  });
  byId("filter").addEventListener("input", draw);

  function sortBy(name, down) {
    [key, isDown] = [name, down];
    draw();
  }

  function order(a, b) {
    const [x, y] = [a[key], b[key]];
    const least = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : (x ?? -1) - (y ?? -1);
    return (isDown ? -least : least) || a.run.localeCompare(b.run, "en", { numeric: true });
  }

  function line(run) {
    const row = el("tr"), box = el("input"), link = el("a", run.run);
    Object.assign(box, { type: "checkbox", checked: chosen.has(run.run), disabled: Boolean(run.problem), ariaLabel: `Compare ${run.run}` });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(run.run); else chosen.delete(run.run);
      offer();
    });
    link.href = `run?name=${encodeURIComponent(run.run)}`;
    const first = el("td", undefined, "box");
    first.append(box);
    row.append(first);
    const name = el("td", undefined, "text long name");
    name.append(run.problem ? el("span", run.run) : link);
    if (run.name && run.name !== run.run.split("/").pop()) name.append(el("div", run.name, "note"));
    row.append(name);
    const status = el("td", undefined, "text");
    status.dataset.title = "status";
    status.append(el("span", run.problem ? "unreadable" : run.status, `pill ${run.problem ? "failed" : run.status}`));
    row.append(status);
    if (run.problem) {
      const why = el("td", run.problem, "text long problem");
      why.colSpan = COLUMNS.length - 2;
      row.append(why);
      return row;
    }
    const result = run.result || (run.stage ? `stage ${run.stage}` : "");
    const cells = [
      [run.method, "text"], [count(run.users), ""], [count(run.rounds), ""], [result, "text long result"], [size(run.wire_bytes), ""],
      [run.started === null ? "" : when(run.started, true), ""],
    ];
    cells.forEach(([text, className], place) => {
      const cell = el("td", text, className);
      cell.dataset.title = COLUMNS[place + 2][1];
      row.append(cell);
    });
    return row;
  }

  function draw() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => `${run.run} ${run.name} ${run.method} ${run.status} ${run.problem ? "unreadable" : ""}`.toLowerCase();
    const seen = runs.filter((run) => words.every((word) => text(run).includes(word))).sort(order);
    for (const cell of head.querySelectorAll("th[data-key]")) {
      if (cell.dataset.key === key) cell.ariaSort = isDown ? "descending" : "ascending"; else cell.removeAttribute("aria-sort");
    }
    byId("sort").value = `${key} ${isDown}`;
    const focused = document.activeElement?.ariaLabel;
    body.replaceChildren(...seen.map(line));
    if (focused) [...body.querySelectorAll("input")].find((box) => box.ariaLabel === focused)?.focus();
    byId("runs").hidden = !seen.length;
    byId("empty").hidden = Boolean(seen.length);
    byId("empty").textContent = runs.length ? "No run is like that." : "There are no runs here yet.";
  }

  function offer() {
    const names = [...chosen].filter((name) => runs.some((run) => run.run === name && !run.problem));
    const link = byId("compare"), isEnough = names.length >= 2 && names.length <= MOST;
    link.setAttribute("aria-disabled", String(!isEnough));
    if (isEnough) link.href = `compare?${names.map((name) => `name=${encodeURIComponent(name)}`).join("&")}`; else link.removeAttribute("href");
    byId("chosen").textContent = names.length ? `${names.length} chosen${isEnough ? "" : `, want 2 to ${MOST}`}` : "";
  }

  let before = "";
  Dash.follow(() => "api/runs", (content) => {
    const text = JSON.stringify(content);
    if (text === before) return;
    before = text;
    runs = content.runs;
    const where = `in ${content.folder}`;
    byId("where").textContent = content.is_there ? `${counted(runs.length, "run")} ${where}` : `${content.folder} is not there yet`;
    draw();
    offer();
  }, () => 2);
})();
