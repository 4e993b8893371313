// The page of `batch-assets view`. What a model or a source wrote is only ever set as text, never as markup.

const PAGE_ROWS = 50;
const FIRST_COLUMNS = ["prompt", "output", "error", "finish_reason", "completion_tokens", "usd"];
const NOT_FIRST = new Set(["model", "engine", "provider", "instance_type", "spot", "run_id", "started_at", "batch",
  "duplicate_of", "reused_from", "tries", "seconds", "tool_calls", "reasoning", "refusal", "logprobs", "turns",
  "prompt_tokens", "error_message"]);
const at = id => document.getElementById(id);
const state = {table: null, about: null, columns: [], query: emptyQuery(), first: 0, line: null, older: null, change: ""};
const boxes = new Map(), asking = {};
let lines = [];

// What is read first stands first.
const ordered = names => ["row_id", "prompt", "output", ...names].filter((name, place, all) =>
  names.includes(name) && all.indexOf(name) === place);

function emptyQuery() { return {search: "", conditions: [], sort: null, descending: false}; }

function made(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role" || name === "scope") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter(child => child !== null));
  return element;
}

const number = value => typeof value === "number" ? value.toLocaleString("en", {maximumSignificantDigits: 6}) : `${value}`;
const time = seconds => new Date(seconds * 1000).toISOString().replace("T", " ").replace(/\.000Z$/, "Z");
const kind = name => state.about.columns.find(one => one.name === name)?.kind;

// One request of each purpose at a time: a newer one ends the older one, here and in the server.
async function ask(purpose, path, body) {
  asking[purpose]?.abort();
  const control = asking[purpose] = new AbortController();
  const answer = await fetch(`/api/${path}`, {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body), signal: control.signal,
  });
  if (!answer.ok) {
    const said = await answer.text();
    let text = said;
    try { text = JSON.parse(said).error; } catch { /* of the guard: plain text */ }
    throw new Error(text.slice(0, 500));
  }
  return answer;
}
const json = async (...asked) => (await ask(...asked)).json();

function say(text, bad = false) {
  at("status").textContent = text;
  at("status").className = bad ? "bad" : "";
}

async function attempt(work) {
  try { await work(); } catch (error) { if (error.name !== "AbortError") say(error.message, true); }
}

function remember() {
  const {dataset, version, part} = state.table;
  const view = {columns: state.columns, query: state.query, first: state.first, line: state.line};
  const said = new URLSearchParams({dataset, version, ...(part ? {part} : {}), view: JSON.stringify(view)});
  history.replaceState(null, "", `/?${said}`);
  document.title = `${dataset}: rows`;
}

// ---- the table -------------------------------------------------------------------------------------------------

async function openTable(table, view = {}) {
  say(`Opening ${table.dataset} …`);
  const about = await json("table", "table", {table});
  state.about = about;
  state.table = {dataset: about.dataset, version: about.version, part: about.part};
  const names = about.columns.map(one => one.name);
  const first = names.filter(name => FIRST_COLUMNS.includes(name) || !NOT_FIRST.has(name));
  const known = (view.columns ?? []).filter(name => names.includes(name));
  Object.assign(state, {columns: known.length ? known : ordered(first).slice(0, 12), query: {...emptyQuery(), ...view.query},
    first: Number.isInteger(view.first) ? view.first : 0, line: view.line ?? null, older: null, change: ""});
  if (!Array.isArray(state.query.conditions)) state.query = emptyQuery();
  at("search").value = state.query.search;
  fillChoices();
  closeRow();
  await refresh({histograms: true});
  if (Number.isInteger(view.line)) await openRow(view.line);
}

// What there is of a table that is being made; the page is loaded again for what came since.
function madeSoFar({committed, rows, every, unreadable}) {
  const parts = [`${number(committed)} of ${number(rows)} rows, being made; load the page again for more`];
  if (every > 1) parts.push(`one batch of ${number(every)} is shown`);
  if (unreadable) parts.push(`${number(unreadable)} batches cannot be read: batch-assets verify names them`);
  return `${parts.join(". ")}.`;
}

function fillChoices() {
  const {versions, columns, being_made: making} = state.about;
  at("making").hidden = !making;
  if (making) at("making").textContent = madeSoFar(making);
  const named = one => `${one.version.slice(0, 8)}, ${time(one.created_at).slice(0, 16)}, ${number(one.rows)} rows`;
  at("version").disabled = Boolean(making);
  at("version").replaceChildren(...versions.map(one => new Option(named(one), one.version)));
  at("version").value = state.table.version;
  const others = versions.filter(one => one.version !== state.table.version);
  at("compare").replaceChildren(new Option("nothing", ""), ...others.map(one => new Option(named(one), one.version)));
  at("compare").disabled = !others.length;
  at("filter-column").replaceChildren(...columns.map(one => new Option(one.name, one.name)));
  at("columns").replaceChildren(...columns.map(one => made("label", {}, made("input", {
    type: "checkbox", checked: state.columns.includes(one.name), onchange: event => {
      const names = columns.map(column => column.name);
      const wanted = new Set(state.columns);
      if (event.target.checked) wanted.add(one.name); else wanted.delete(one.name);
      state.columns = ordered(names.filter(name => wanted.has(name)));
      refresh({});
    }}), ` ${one.name}`)));
}

async function refresh({histograms = false}) {
  remember();
  showConditions();
  const began = performance.now();
  const {table, query, columns, first} = state;
  say("Looking …");
  at("scroll").setAttribute("aria-busy", "true");
  if (state.older) { await attempt(showDifferences); return; }
  const page = attempt(async () => {
    const answer = await json("rows", "rows", {table, query, columns, first, rows: PAGE_ROWS});
    showRows(answer.rows);
    showPager(answer.found);
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    say(`${number(answer.found)} of ${number(state.about.rows)} rows, in ${seconds} s`);
  });
  await page;
  at("scroll").setAttribute("aria-busy", "false");
  if (histograms) await attempt(showHistograms);
}

function changed() {
  state.query = {...state.query};  // what is under way for the one before sees that it is over
  state.first = 0;
  state.older = null;
  at("compare").value = "";
  refresh({histograms: true});
}

function cell(name, value) {
  const kinds = kind(name);
  if (value === null || value === undefined) return made("td", {}, made("span", {className: "none", textContent: "–"}));
  if (kinds === "number") return made("td", {className: "number", textContent: number(value)});
  const long = name === "prompt" || name === "output";
  const short = !long && `${value}`.length <= 24;
  const text = made("span", {className: name === "error" ? "cell bad" : "cell", textContent: `${value}`});
  return made("td", {className: name === "row_id" ? "id" : long ? "long" : short ? "short" : ""}, text);
}

function showRows(rows) {
  const {columns, query} = state;
  lines = rows.map(row => row[0]);
  at("rows").tHead.replaceChildren(made("tr", {}, ...columns.map(name => {
    const order = query.sort !== name ? "none" : query.descending ? "descending" : "ascending";
    const mark = {none: "", ascending: " ▲", descending: " ▼"}[order];
    const sort = () => {
      const next = {none: ["sort", false], ascending: ["sort", true], descending: [null, false]}[order];
      Object.assign(state.query, {sort: next[0] && name, descending: next[1]});
      state.first = 0;
      refresh({});
    };
    return made("th", {scope: "col", "aria-sort": order},
      made("button", {type: "button", textContent: `${name}${mark}`, onclick: sort}));
  })));
  at("rows").tBodies[0].replaceChildren(...rows.map(([line, ...values], place) => made("tr", {
    tabIndex: place ? -1 : 0, "aria-selected": `${line === state.line}`, onclick: () => attempt(() => openRow(line)),
  }, ...values.map((value, number) => cell(columns[number], value)))));
}

function showPager(count) {
  const pages = Math.max(1, Math.ceil(count / PAGE_ROWS)), page = Math.floor(state.first / PAGE_ROWS) + 1;
  at("page").value = page;
  at("page").max = pages;
  at("pages").textContent = `of ${number(pages)}`;
  at("previous").disabled = page <= 1;
  at("next").disabled = page >= pages;
}

async function turn(page) {
  const pages = Number(at("page").max);
  state.first = (Math.min(Math.max(1, page), pages) - 1) * PAGE_ROWS;
  await refresh({});
}

// ---- filters and histograms ------------------------------------------------------------------------------------

function wordsOf({column, values, low, high, contains, filled}) {
  const parts = [];
  const said = value => kind(column) === "time" ? time(value) : number(value);
  if (values) parts.push(`is ${values.map(value => value ?? "without a value").join(" or ")}`);
  if (low !== undefined && low !== null) parts.push(`from ${said(low)}`);
  if (high !== undefined && high !== null) parts.push(`below ${said(high)}`);
  if (contains) parts.push(`contains ${contains}`);
  if (filled !== undefined) parts.push(filled ? "has a value" : "has no value");
  return `${column} ${parts.join(", ")}`;
}

function showConditions() {
  const {query} = state;
  const remove = one => made("button", {type: "button", textContent: `${wordsOf(one)} ✕`, title: "Remove this filter",
    onclick: () => { query.conditions = query.conditions.filter(other => other !== one); changed(); }});
  at("conditions").replaceChildren(...query.conditions.map(remove));
  const dead = query.conditions.some(one => one.column === "error" && one.filled);
  at("dead").setAttribute("aria-pressed", `${dead}`);
}

const conditionOf = column => state.query.conditions.find(one => one.column === column);

function setCondition(column, condition) {
  state.query.conditions = state.query.conditions.filter(one => one.column !== column);
  if (condition) state.query.conditions.push({column, ...condition});
  changed();
}

async function showHistograms() {
  const {table, query, about} = state;
  const wanted = query;
  if (boxes.of !== about) {
    boxes.of = about;
    boxes.clear();
    for (const name of about.pictured) {
      boxes.set(name, made("section", {className: "histogram"}, made("h2", {textContent: name}), made("div")));
    }
    at("bars").replaceChildren(...boxes.values());
  }
  const left = [...about.pictured];
  const some = async () => {
    for (let name = left.shift(); name !== undefined && state.query === wanted; name = left.shift()) {
      const {histogram} = await json(`histogram ${name}`, "histogram", {table, query, column: name});
      if (histogram) boxes.get(name).lastChild.replaceWith(picture(histogram));
    }
  };
  await Promise.all([some(), some()]);
}

function picture({column, kind: kinds, bars, others}) {
  const most = Math.max(1, ...bars.map(bar => bar.count)), chosen = conditionOf(column);
  const numbers = bars.length > 0 && bars[0].low !== null;
  const said = value => kinds === "time" ? time(value) : number(value);
  const buttons = bars.map((bar, place) => {
    const range = bar.high === null ? `${said(bar.low)} and more` : `${said(bar.low)} to ${said(bar.high)}`;
    const label = numbers ? range : bar.value === null ? "no value" : `${bar.value}`;
    const inside = numbers && chosen && (chosen.low ?? -Infinity) <= bar.low && (chosen.high ?? Infinity) >= (bar.high ?? Infinity);
    const pressed = numbers ? Boolean(inside) : Boolean(chosen?.values?.includes(bar.value));
    const drawn = made("span", {className: "bar"});
    drawn.style[numbers ? "height" : "width"] = `${Math.max(bar.count ? 2 : 0, 100 * bar.count / most)}%`;
    const button = made("button", {type: "button", tabIndex: place ? -1 : 0, "aria-pressed": `${pressed}`,
      title: `${label}: ${number(bar.count)} rows`, "aria-label": `${label}: ${number(bar.count)} rows`});
    if (!numbers) button.append(made("span", {textContent: label}), made("span", {textContent: number(bar.count)}));
    button.append(drawn);
    button.onclick = event => {
      if (!numbers) {
        const values = new Set(chosen?.values ?? []);
        if (!values.delete(bar.value)) values.add(bar.value);
        setCondition(column, values.size ? {values: [...values]} : null);
      } else if (event.shiftKey && chosen) {
        const high = bar.high === null || chosen.high === null ? null : Math.max(chosen.high ?? bar.high, bar.high);
        setCondition(column, {low: Math.min(chosen.low ?? bar.low, bar.low), high});
      } else setCondition(column, pressed ? null : {low: bar.low, high: bar.high});
    };
    return button;
  });
  const group = made("div", {className: numbers ? "numbers" : "values", role: "group", "aria-label": column}, ...buttons);
  group.onkeydown = event => step(event, buttons, ["ArrowRight", "ArrowDown"], ["ArrowLeft", "ArrowUp"]);
  const last = bars.at(-1);
  const ends = numbers ? made("div", {className: "ends"}, made("span", {textContent: said(bars[0].low)}),
    made("span", {textContent: last.high === null ? `over ${said(last.low)}` : said(last.high)})) : null;
  const more = others ? made("div", {className: "ends", textContent: `other values: ${number(others)}`}) : null;
  const none = bars.length ? null : made("p", {className: "none", textContent: "no rows"});
  return made("div", {}, group, ends, more, none);
}

// One stop of the tab key for a group; the arrow keys move in it.
function step(event, all, forth, back) {
  const place = all.indexOf(document.activeElement);
  const next = forth.includes(event.key) ? place + 1 : back.includes(event.key) ? place - 1 : null;
  if (place < 0 || next === null || !all[next]) return;
  event.preventDefault();
  all[place].tabIndex = -1;
  all[next].tabIndex = 0;
  all[next].focus();
}

// ---- one row ---------------------------------------------------------------------------------------------------

function closeRow() {
  at("detail").hidden = true;
  at("detail").replaceChildren();
  state.line = null;
  for (const row of at("rows").tBodies[0].rows) row.setAttribute("aria-selected", "false");
}

const text = value => typeof value === "string" ? value : JSON.stringify(value, null, 2);
const block = (title, value) => made("section", {}, made("h3", {textContent: title}), made("pre", {tabIndex: 0, textContent: text(value)}));

function messages(value) {
  if (!Array.isArray(value)) return [block("prompt", value)];
  return value.flatMap(message => {
    const {role, content, ...rest} = message;
    const more = Object.entries(rest).filter(([, one]) => one !== null && !(Array.isArray(one) && !one.length));
    const parts = content === null || content === undefined ? [] : [block(role, content)];
    return [...parts, ...more.map(([name, one]) => block(`${role}: ${name}`, one))];
  });
}

async function openRow(line, table = state.table) {
  const {row} = await json("row", "row", {table, line});
  if (table === state.table) { state.line = line; remember(); }
  [...at("rows").tBodies[0].rows].forEach((one, place) =>
    one.setAttribute("aria-selected", `${!state.older && lines[place] === line}`));
  const shown = new Set(["prompt", "output", "reasoning", "refusal", "error", "error_message", "turns", "tool_calls", "logprobs"]);
  const has = name => row[name] !== null && row[name] !== undefined;
  const place = lines.indexOf(line);
  const move = by => { const next = lines[place + by]; if (next !== undefined) attempt(() => openRow(next)); };
  const head = made("header", {}, made("h2", {textContent: `Row ${row.row_id ?? line}`}),
    made("button", {type: "button", textContent: "Previous row", disabled: place <= 0, onclick: () => move(-1)}),
    made("button", {type: "button", textContent: "Next row", disabled: place < 0 || place >= lines.length - 1, onclick: () => move(1)}),
    made("button", {type: "button", textContent: "Close", onclick: leaveRow}));
  const parts = [];
  if (has("error")) parts.push(made("p", {className: "bad", role: "note",
    textContent: `Dead letter: ${row.error}${has("error_message") ? `: ${row.error_message}` : ""}`}));
  if (has("turns")) parts.push(...row.turns.flatMap?.((one, turn) => [
    ...(turn === 0 && has("prompt") ? messages(row.prompt) : []), ...(one.user ? [block("user", one.user)] : []),
    block(`answer ${turn + 1}`, one.output)]) ?? [block("turns", row.turns)]);
  else if (has("prompt")) parts.push(...messages(row.prompt));
  if (has("reasoning")) parts.push(block("reasoning", row.reasoning));
  if (has("output") && !has("turns")) parts.push(block("output", row.output));
  for (const name of ["refusal", "tool_calls"]) if (has(name)) parts.push(block(name, row[name]));
  const beside = made("section");
  parts.push(beside);
  const facts = Object.entries(row).filter(([name, value]) => !shown.has(name) && value !== null);
  parts.push(made("dl", {}, ...facts.flatMap(([name, value]) => [made("dt", {textContent: name}), made("dd", {textContent: text(value)})])));
  if (has("logprobs")) parts.push(made("details", {}, made("summary", {textContent: "logprobs"}), block("logprobs", row.logprobs)));
  at("detail").replaceChildren(head, ...parts);
  at("detail").hidden = false;
  at("detail").scrollTop = 0;
  at("detail").focus({preventScroll: true});
  attempt(() => showSamples(beside, line, table));
}

async function showSamples(section, line, table) {
  const {samples} = await json("samples", "samples", {table, line});
  if (samples.length < 2) return;
  const named = one => one.line === line ? "this row" : Number.isInteger(one.sample_index) ? `sample ${one.sample_index}`
    : `line ${number(one.line)}`;
  const answers = samples.map(one => made("div", {}, made("h3", {textContent: named(one)}),
    made("pre", {tabIndex: 0, textContent: one.output ?? `no answer: ${one.error}`}),
    one.line === line ? null : made("button", {type: "button", textContent: "Open", onclick: () => attempt(() => openRow(one.line, table))})));
  section.append(made("h3", {textContent: `${samples.length} answers to this prompt`}), made("div", {className: "beside"}, ...answers));
}

function leaveRow() {
  const place = Math.max(0, lines.indexOf(state.line));
  closeRow();
  remember();
  at("rows").tBodies[0].rows[place]?.focus();
}

// ---- two versions ----------------------------------------------------------------------------------------------

async function showDifferences() {
  const began = performance.now();
  const older = {...state.table, version: state.older}, newer = state.table;
  const asked = {table: older, newer, change: state.change, first: state.first, rows: PAGE_ROWS};
  const {counts, columns, rows} = await json("rows", "differences", asked);
  const shown = state.change ? counts[state.change] : counts.added + counts.removed + counts.changed;
  lines = [];
  const only = made("select", {ariaLabel: "Which changes", onchange: event => { state.change = event.target.value; state.first = 0; refresh({}); }},
    new Option("all changes", ""), ...Object.entries(counts).map(([name, count]) => new Option(`${name}: ${number(count)}`, name)));
  only.value = state.change;
  at("rows").tHead.replaceChildren(made("tr", {}, made("th", {scope: "col"}, only),
    ...["row_id", `before (${state.older.slice(0, 8)})`, `after (${newer.version.slice(0, 8)})`].map(name => made("th", {scope: "col", textContent: name}))));
  const value = cells => {
    if (!cells) return made("td", {className: "long"}, made("span", {className: "none", textContent: "not there"}));
    const one = Object.fromEntries(columns.map((name, place) => [name, cells[place]]));
    return cell(one.output === null || one.output === undefined ? "error" : "output", one.output ?? one.error);
  };
  at("rows").tBodies[0].replaceChildren(...rows.map(({change, before, after, lines: [old, now]}, place) => made("tr", {
    tabIndex: place ? -1 : 0, onclick: () => attempt(() => now === null ? openRow(old, older) : openRow(now)),
  }, made("td", {textContent: change}), made("td", {textContent: `${(after ?? before)?.[0] ?? ""}`}), value(before), value(after))));
  showPager(shown);
  at("scroll").setAttribute("aria-busy", "false");
  say(`${number(counts.changed)} rows changed, ${number(counts.added)} added, ${number(counts.removed)} removed, in ${((performance.now() - began) / 1000).toFixed(1)} s`);
}

// ---- controls --------------------------------------------------------------------------------------------------

at("find").onsubmit = event => {
  event.preventDefault();
  state.query = {...state.query, search: at("search").value};
  changed();
};
at("search").onsearch = () => { if (!at("search").value && state.query.search) at("find").requestSubmit(); };
at("dead").onclick = () => {
  const on = at("dead").getAttribute("aria-pressed") === "true";
  setCondition("error", on ? null : {filled: true});
};
at("filter").onsubmit = event => {
  event.preventDefault();
  const column = at("filter-column").value, rule = at("filter-rule").value, value = at("filter-value").value;
  const numeric = ["number", "time"].includes(kind(column));
  const bound = kind(column) === "time" ? Date.parse(value) / 1000 : Number(value);
  if (["low", "high"].includes(rule) && !(numeric && value !== "" && Number.isFinite(bound))) {
    say(`${column}: expected a column of numbers or times, and a number or time`, true);
    return;
  }
  const plain = kind(column) === "number" ? Number(value) : value;
  state.query.conditions.push({column, ...{contains: {contains: value}, is: {values: [plain]}, low: {low: bound},
    high: {high: bound}, empty: {filled: false}}[rule]});
  changed();
};
at("dataset").onchange = () => {
  const [dataset, part = null] = at("dataset").value.split("/");
  attempt(() => openTable({dataset, version: null, part}));
};
at("version").onchange = () => attempt(() => openTable({...state.table, version: at("version").value}, {...state, line: null}));
at("compare").onchange = () => {
  Object.assign(state, {older: at("compare").value || null, first: 0, change: ""});
  closeRow();
  refresh({});
};
at("previous").onclick = () => turn(Number(at("page").value) - 1);
at("next").onclick = () => turn(Number(at("page").value) + 1);
at("page").onchange = () => turn(Math.floor(Number(at("page").value)) || 1);
for (const button of document.querySelectorAll("[data-form]")) button.onclick = () => attempt(async () => {
  say("Saving …");
  const {table, query} = state, form = button.dataset.form;
  const answer = await ask("export", "export", {table, query, form});
  const link = made("a", {href: URL.createObjectURL(await answer.blob()), download: `${table.dataset}-${table.version}.${form}`});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  const all = answer.headers.get("X-Whole") === "true";
  say(`${number(Number(answer.headers.get("X-Rows")))} rows saved${all ? "" : "; there are more: batch-assets export writes all of them"}`);
});
at("rows").tBodies[0].onkeydown = event => {
  const rows = [...at("rows").tBodies[0].rows];
  if (event.key === "Enter") document.activeElement.click();
  else step(event, rows, ["ArrowDown"], ["ArrowUp"]);
};
document.onkeydown = event => {
  if (event.key === "Escape" && !at("detail").hidden) leaveRow();
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    at("search").focus();
  }
};

attempt(async () => {
  const asked = new URLSearchParams(location.search);
  let view = {};
  try { view = JSON.parse(asked.get("view") ?? "{}"); } catch { /* an address that somebody cut */ }
  const {datasets} = await json("tables", "tables", {});
  const name = asked.get("dataset"), made = asked.get("part");
  const wanted = name ? `${name}${made ? `/${made}` : ""}` : null;
  const choices = datasets.flatMap(one => [...(one.table ? [one.name] : []), ...one.parts.map(part => `${one.name}/${part}`)]);
  if (wanted && !choices.includes(wanted)) choices.push(wanted);
  at("dataset").replaceChildren(...choices.map(one => new Option(one.replace("/", ", ").replace(", unfinished", ", being made"), one)));
  if (!choices.length) { say("No dataset has rows yet: batch-assets run NAME makes some", true); return; }
  at("dataset").value = wanted ?? choices[0];
  const [dataset, part = null] = at("dataset").value.split("/");
  // Of a table that is being made the page shows what there is now, not what there was.
  const version = part === "unfinished" ? null : asked.get("version");
  await openTable({dataset, version, part}, view);
});
