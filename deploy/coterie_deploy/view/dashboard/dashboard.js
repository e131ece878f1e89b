// What the pages have in common: numbers in words, tables, and asking again and again. All text goes in as text, never as markup.
"use strict";
const Dash = (() => {
  const byId = (id) => document.getElementById(id);

  function el(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined && text !== null) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  const count = (number) => (number === null || number === undefined ? "-" : number.toLocaleString("en-US", { maximumFractionDigits: 2 }));
  const counted = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

  function size(bytes) {
    if (bytes === null || bytes === undefined) return "-";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let power = 0;
    for (; bytes >= 999.5 && power < units.length - 1; power += 1) bytes /= 1000;
    return `${bytes.toFixed(power === 0 ? 0 : bytes < 9.995 ? 2 : bytes < 99.95 ? 1 : 0)} ${units[power]}`;
  }

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "-";
    if (seconds < 59.5) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
    const whole = Math.round(seconds), two = (number) => String(number).padStart(2, "0");
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  }

  function figure(value) {
    if (value === null || value === undefined) return "-";
    return Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(5)));
  }

  const two = (number) => String(number).padStart(2, "0");
  function when(at, withDay) {
    const time = new Date(1000 * at);
    const day = `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} `;
    return `${withDay ? day : ""}${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
  }

  // Columns are [title, class]: none is a number, "text" a word, "text long" what may be broken. Rows are lists of texts, or of nodes.
  // What has not changed is left alone.
  const shown = new WeakMap();
  function fill(table, columns, rows, signature) {
    const text = JSON.stringify([columns, signature || rows]);
    if (shown.get(table) === text) return;
    shown.set(table, text);
    const head = el("tr");
    for (const [title, kind] of columns) {
      const cell = el("th", title, kind);
      cell.scope = "col";
      head.append(cell);
    }
    const body = el("tbody");
    for (const row of rows) {
      const line = el("tr");
      row.forEach((value, place) => {
        const cell = el("td", undefined, columns[place][1]);
        cell.append(value);
        line.append(cell);
      });
      body.append(line);
    }
    const top = el("thead");
    top.append(head);
    table.replaceChildren(top, body);
  }

  function tabs(fieldset, choices, chosen, onChoice) {
    const text = JSON.stringify([choices, chosen]);
    if (shown.get(fieldset) === text) return;
    shown.set(fieldset, text);
    fieldset.replaceChildren(...Object.entries(choices).map(([value, title]) => {
      const label = el("label"), input = el("input");
      Object.assign(input, { type: "radio", name: fieldset.id, value, checked: value === chosen });
      input.addEventListener("change", () => onChoice(value));
      label.append(input, title);
      return label;
    }));
  }

  function say(sentence) {
    const place = byId("problem");
    place.textContent = sentence;
    place.hidden = !sentence;
  }

  // Asks until the page is left, every `seconds(content)`; not while nobody looks. Returns a function that asks at once.
  function follow(address, onContent, seconds) {
    let timer = 0, turn = 0, pause = 2;
    async function ask() {
      clearTimeout(timer);
      const own = ++turn;
      if (!document.hidden) {
        try {
          const answer = await fetch(address(), { cache: "no-cache" });
          if (own !== turn) return;
          if (!answer.ok) throw new Error(await answer.text());
          const content = await answer.json();
          if (own !== turn) return;
          say("");
          pause = seconds(content);
          onContent(content);
        } catch (error) {
          if (own !== turn) return;
          say(error instanceof TypeError ? "The dashboard's server does not answer." : String(error.message || error));
          if (!(error instanceof TypeError)) pause = 10;
        }
      }
      timer = setTimeout(ask, 1000 * pause);
    }
    document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
    ask();
    return ask;
  }

  return { byId, el, count, counted, size, duration, figure, when, fill, tabs, say, follow };
})();
