"use strict";
// Draws the tables and figures of a report from its data. Names are hostile until shown otherwise: text only ever
// becomes text (`textContent`, or a label on a canvas), with what is invisible in it spelled out.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/;
  const MOST_ROWS = 100, MOST_TILES = 400, LONG = 400, SHORT = 16;
  // Paul Tol's light scheme: told apart by the colour-blind, and black text is readable on each.
  const MIXED = "#dddddd", COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00"];
  const INK = "#14171a";

  const visible = (text) =>
    String(text).replace(/[\ud800-\udbff][\udc00-\udfff]|[^]/g, (each) =>
      each.length === 2 || !each.match(HIDDEN) ? each : "\\u" + each.charCodeAt(0).toString(16).padStart(4, "0"));
  const cut = (text, most) => {
    const shown = visible(text);
    return shown.length <= most ? shown : shown.slice(0, most / 2) + " … " + shown.slice(-most / 2);
  };
  const count = (value) => Number(value).toLocaleString("en-US");
  const size = (value) => {
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (value >= unit) {
        const digits = (value / unit).toFixed(value / unit < 100 ? 2 : 1);
        return digits.replace(/\.?0+$/, "") + " " + letter + "B";
      }
    return value + " B";
  };
  const percent = (part, whole) => (whole ? (100 * part / whole).toFixed(part && part < whole / 100 ? 2 : 1) : "0") + " %";
  // The end of a long name tells more than its beginning.
  const ending = (name, most) => {
    const text = cut(name, 400);
    return text.length <= most ? text : "…" + text.slice(1 - most);
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "onclick") made.addEventListener("click", value);
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  // --- search: one field for everything that listens; numbers match any number, as rules hold every index

  const listeners = [];
  const loosely = (text) => String(text).toLowerCase().replace(/\{[^}]*\}|\*|\d+/g, "#");
  let wanted = "";
  const matches = (texts) =>
    !wanted || texts.some((text) => String(text).toLowerCase().includes(wanted) || loosely(text).includes(loosely(wanted)));
  const field = document.getElementById("search");
  let waiting = 0;
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      wanted = field.value.trim().toLowerCase();
      const found = listeners.map((tell) => tell()).reduce((sum, rows) => sum + rows, 0);
      document.getElementById("found").textContent = wanted ? count(found) + (found === 1 ? " row" : " rows") : "";
    }, 120);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault();
    field.focus();
  });

  // --- tables

  const csv = (table, rows) =>
    [table.columns.map((column) => column.title), ...rows]
      .map((row) => row.map((cell) => (/[",\r\n]/.test(cell) ? '"' + String(cell).replaceAll('"', '""') + '"' : cell)).join(","))
      .join("\r\n") + "\r\n";
  const asJson = (table, rows) =>
    JSON.stringify(rows.map((row) => Object.fromEntries(table.columns.map((column, at) => [column.title, row[at]]))), null, 1);

  function save(name, type, text) {
    const url = URL.createObjectURL(new Blob([text], { type }));
    element("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  async function copy(button, text) {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }

  const numeric = (kind) => ["count", "bytes", "share", "number"].includes(kind);
  // Any number, in three digits; what JSON lacks comes as a word, of which `Number` makes the number again.
  const shortly = (value) => {
    const given = Number(Number(value).toPrecision(3));
    if (!Number.isFinite(given)) return Number.isNaN(given) ? "NaN" : given > 0 ? "∞" : "-∞";
    if (given === 0 || (Math.abs(given) >= 1e-3 && Math.abs(given) < 1e5)) return String(given);
    return given.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  };
  // What is no number comes before all others where the largest come first.
  const comparable = (value) => (Number.isNaN(Number(value)) ? Infinity : Number(value));
  const compared = (a, b) => (comparable(a) === comparable(b) ? 0 : comparable(a) < comparable(b) ? -1 : 1);

  function cell(kind, value, whole) {
    if (kind === "share") {
      const bar = element("i");
      bar.style.width = (whole ? Math.max(value ? 1 : 0, 64 * value / whole) : 0) + "px";
      return element("td", { class: "share" }, element("span", {}, percent(value, whole)), bar);
    }
    if (kind === "count" || kind === "bytes") {
      const title = kind === "bytes" ? { title: count(value) + " bytes" } : {};
      return element("td", { class: "number", ...title }, kind === "bytes" ? size(value) : count(value));
    }
    if (kind === "number") return element("td", { class: "number", title: String(value) }, shortly(value));
    const text = visible(value);
    const made = element("td", { class: kind === "name" ? "name" : text.length <= SHORT ? "text short" : "text", dir: "auto" });
    // Long names break after a dot rather than anywhere.
    const broken = kind === "name" ? text.split(/(?<=[^.]\.)/).flatMap((part, at) => (at ? [element("wbr"), part] : [part])) : [text];
    made.append(...(text.length > LONG ? [element("span", { class: "long", tabindex: "0" }, ...broken)] : broken));
    return made;
  }

  // Shows a table; `enter(row)` gives what a button in its first cell does, or nothing.
  function show(host, table, enter) {
    let by = -1, down = true, most = MOST_ROWS;
    const totals = table.columns.map((column, at) =>
      column.kind === "share" ? table.rows.reduce((sum, row) => sum + row[at], 0) : 0);
    const texts = table.columns.flatMap((column, at) => (numeric(column.kind) ? [] : [at]));
    const rows = () => {
      const found = table.rows.filter((row) => matches(texts.map((at) => row[at])));
      if (by < 0) return found;
      const sign = down ? -1 : 1;
      return [...found].sort((a, b) =>
        sign * (numeric(table.columns[by].kind) ? compared(a[by], b[by]) : String(a[by]).localeCompare(String(b[by]), "en", { numeric: true })));
    };
    const title = element("h3", { id: "title-" + table.id }, table.title);
    const copying = element("button", { type: "button", onclick: () => copy(copying, csv(table, rows())) }, "Copy");
    const saving = (type, make) => element("button", {
      type: "button", "aria-label": "Download " + table.title + " as " + type.toUpperCase(),
      onclick: () => save(table.id + "." + type, type === "csv" ? "text/csv" : "application/json", make(table, rows())),
    }, type.toUpperCase());
    copying.setAttribute("aria-label", "Copy " + table.title);
    const heads = table.columns.map((column, at) => {
      const sort = () => {
        down = by === at ? !down : numeric(column.kind);
        by = at;
        draw();
      };
      const attributes = { scope: "col", class: numeric(column.kind) && column.kind !== "share" ? "number" : "text" };
      return element("th", attributes, element("button", { type: "button", onclick: sort }, column.title));
    });
    const body = element("tbody"), more = element("p", { class: "more" });
    const scroll = element("div", { class: "scroll", role: "region", tabindex: "0", "aria-labelledby": title.id },
      element("table", { "aria-labelledby": title.id }, element("thead", {}, element("tr", {}, ...heads)), body));
    host.replaceChildren(element("div", { class: "tools" }, title, copying, saving("csv", csv), saving("json", asJson)), scroll, more);
    if (table.left_out) host.append(element("p", { class: "quiet" }, table.left_out));

    function draw() {
      const found = rows();
      heads.forEach((head, at) => {
        if (at === by) head.setAttribute("aria-sort", down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      body.replaceChildren(...found.slice(0, most).map((row) => {
        const cells = table.columns.map((column, at) => cell(column.kind, row[at], totals[at]));
        const step = enter && enter(row);
        if (step) cells[0].replaceChildren(element("button", { type: "button", onclick: step }, ...cells[0].childNodes));
        return element("tr", {}, ...cells);
      }));
      more.replaceChildren();
      if (found.length > most)
        more.append(element("button", { type: "button", onclick: () => { most = Infinity; draw(); } },
          "Show all " + count(found.length) + " rows"));
      else if (!found.length) more.append("No row matches.");
      return found.length;
    }
    draw();
    return draw;
  }

  // --- charts

  const charts = [];
  function chart(host, label, options) {
    host.setAttribute("role", "img");
    host.setAttribute("aria-label", label);
    const drawn = window.echarts.init(host, null, { renderer: "canvas" });
    const draw = () => drawn.setOption(options(), { replaceMerge: ["series"] });
    charts.push({ drawn, draw });
    draw();
    new ResizeObserver(() => drawn.resize()).observe(host);
    return { drawn, draw };
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((each) => each.draw()));
  addEventListener("beforeprint", () => charts.forEach(({ drawn, draw }) => { draw(); drawn.resize({ width: 680 }); }));
  addEventListener("afterprint", () => charts.forEach(({ drawn, draw }) => { drawn.resize({ width: "auto" }); draw(); }));

  function tooltip(describe) {
    return {
      className: "hint", confine: true, backgroundColor: css("--paper"), borderColor: css("--line"), borderWidth: 1,
      padding: [8, 12], textStyle: { color: css("--ink") },
      formatter: (given) => {
        const lines = describe(given);
        if (!lines) return "";
        return element("div", {}, element("b", {}, cut(lines[0], 240)), ...lines.slice(1).map((line) => element("div", {}, cut(line, 240))));
      },
    };
  }

  // --- treemap of bytes
  // A group is all tensors of one rule that are alike: one for each combination of its indices. A node of the tree is a
  // set of such groups with some indices fixed; its children are made when they are looked at.

  const runsCount = (runs) => runs.reduce((sum, [from, to]) => sum + to - from + 1, 0);
  const spread = (runs) => runs.flatMap(([from, to]) => Array.from({ length: to - from + 1 }, (_, at) => from + at));
  const holds = (runs, index) => runs.some(([from, to]) => from <= index && index <= to);

  // A part of a group: `at` is how many of its axes are fixed.
  const partTensors = ({ group, at }) => group.sets.slice(at).reduce((product, runs) => product * runsCount(runs), 1);

  function node(label, parts, level, from) {
    const tensors = parts.reduce((sum, part) => sum + (part.rest ? part.rest.count : partTensors(part)), 0);
    const bytes = parts.reduce((sum, part) => sum + (part.rest ? part.rest.bytes : partTensors(part) * part.group.each), 0);
    return { label, parts, level, from, tensors, bytes };
  }

  function grouped(parts, keyOf) {
    const found = new Map();
    for (const part of parts) {
      const key = keyOf(part);
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(part);
    }
    return found;
  }

  // Nodes for each index of the next axis; parts without one keep apart, by what they are.
  function byIndex(parent, level, apart) {
    const made = [], plain = parent.parts.filter((part) => part.rest || part.at >= part.group.sets.length);
    const rest = parent.parts.filter((part) => !plain.includes(part));
    for (const [axis, alike] of grouped(rest, (part) => part.group.axes[part.at])) {
      const indices = new Set(alike.flatMap((part) => spread(part.group.sets[part.at])));
      for (const index of [...indices].sort((a, b) => a - b)) {
        const inside = alike.filter((part) => holds(part.group.sets[part.at], index)).map((part) => ({ ...part, at: part.at + 1 }));
        made.push(node((axis ? axis + " " : "") + index, inside, level, parent));
      }
    }
    return [...made, ...apart(plain)];
  }

  const componentOf = (part) => (part.rest ? "all smaller rows" : part.group.component);
  const roleOf = (part) => [part.group.role, part.group.dtype, part.group.shape.join(" x ")].filter(Boolean).join(" · ");

  function children(parent, order) {
    const { parts, level } = parent;
    const components = (from, next) =>
      [...grouped(from, componentOf)].map(([label, alike]) => node(label, alike, next, parent));
    if (level === "root") {
      const slots = grouped(parts, (part) => (part.rest ? "" : part.group.slot));
      if (slots.size > 1) return [...slots].map(([slot, alike]) => node(slot || "weights", alike, "slot", parent));
    }
    if (level === "root" || level === "slot")
      return order === "component" ? components(parts, "index") : byIndex(parent, "layer", (plain) => components(plain, "index"));
    if (level === "layer") return components(parts, "index");
    if (level === "leaf" || parts.some((part) => part.rest)) return [];
    if (parts.every((part) => part.at >= part.group.sets.length))
      return parts.length > 1 ? parts.map((part) => node(roleOf(part), [part], "leaf", parent)) : [];
    return byIndex(parent, "index", (plain) => plain.map((part) => node(roleOf(part), [part], "leaf", parent)));
  }

  function treemap(host, figure) {
    const parts = figure.data.groups.map((group) => ({ group, at: 0 }));
    if (figure.data.rest.count) parts.push({ rest: figure.data.rest });
    const root = node("everything", parts, "root", null);
    const amounts = new Map();
    for (const part of parts)
      amounts.set(componentOf(part), (amounts.get(componentOf(part)) || 0) + (part.rest ? part.rest.bytes : partTensors(part) * part.group.each));
    const colours = new Map([...amounts].sort((a, b) => b[1] - a[1]).map(([name], at) => [name, COLOURS[at] || MIXED]));
    let order = "component", current = root, drawnNodes = [];
    const nodeOf = (given) => given.data && drawnNodes[given.data.at];

    const fits = (each) => each.parts.some((part) =>
      part.rest ? !wanted : matches([part.group.component, part.group.rule, part.group.example, part.group.dtype, part.group.slot]));
    const colour = (each) => {
      const names = new Set(each.parts.map(componentOf));
      return names.size === 1 ? colours.get([...names][0]) : MIXED;
    };
    const tile = (each, inner) => ({
      name: cut(each.label, 80), value: each.bytes, at: drawnNodes.push(each) - 1,
      itemStyle: { color: colour(each), opacity: fits(each) ? 1 : 0.15 }, children: inner,
      label: { opacity: fits(each) ? 1 : 0.3 },
    });
    // The largest, and one for all others, so that no area is left out.
    const few = (nodes, parent) => {
      const sorted = nodes.filter((each) => each.bytes > 0).sort((a, b) => b.bytes - a.bytes);
      if (sorted.length <= MOST_TILES) return sorted;
      const others = sorted.slice(MOST_TILES - 1);
      const made = node(count(others.length) + " smaller ones", others.flatMap((each) => each.parts), "leaf", parent);
      return [...sorted.slice(0, MOST_TILES - 1), made];
    };
    const tiles = () => {
      drawnNodes = [];
      const outer = few(children(current, order), current);
      if (!outer.length) return current.bytes ? [tile(current)] : [];
      const inside = Math.floor(4000 / outer.length);
      return outer.map((each) => {
        const inner = few(children(each, order), each);
        return tile(each, inner.length > 1 && inner.length <= inside ? inner.map((leaf) => tile(leaf)) : undefined);
      });
    };
    const described = (each) => [
      path(each).slice(1).map((step) => step.label).join(" / ") || each.label,
      `${count(each.tensors)} ${each.tensors === 1 ? "tensor" : "tensors"}, ${size(each.bytes)}, ${percent(each.bytes, root.bytes)} of all`,
      ...(each.parts.length === 1 && each.parts[0].group ? [each.parts[0].group.rule] : []),
    ];
    const options = () => ({
      animation: false,
      tooltip: tooltip((given) => nodeOf(given) && described(nodeOf(given))),
      series: [{
        type: "treemap", width: "100%", height: "100%", left: 0, top: 0, roam: false, nodeClick: false, breadcrumb: { show: false },
        data: tiles(), leafDepth: null, sort: false, visibleMin: 4, squareRatio: 1,
        label: { color: INK, fontSize: 12, lineHeight: 15, overflow: "truncate", padding: [4, 5], position: "insideTopLeft",
          formatter: (each) => (each.treePathInfo.length > 2 ? nodeOf(each).label.split(" ").at(-1) : each.name + "\n" + size(each.value)) },
        upperLabel: { show: true, height: 20, color: css("--ink"), fontSize: 12, fontWeight: 600, overflow: "truncate",
          formatter: (each) => each.name + "  " + size(each.value) },
        itemStyle: { borderColor: css("--paper"), borderWidth: 1, gapWidth: 1 },
        levels: [
          { itemStyle: { borderWidth: 0, gapWidth: 3 }, upperLabel: { show: false } },
          { itemStyle: { borderWidth: 1, gapWidth: 1 } },
          { itemStyle: { borderWidth: 0, gapWidth: 1 } },
        ],
      }],
    });

    function path(to) {
      const steps = [];
      for (let each = to; each; each = each.from) steps.unshift(each);
      return steps;
    }
    const choice = (name, text) => {
      const made = element("button", { type: "button", onclick: () => { order = name; go(root); } }, text);
      made.order = name;
      return made;
    };
    const choices = [choice("component", "By tensor"), choice("layer", "By layer")];
    const crumbs = element("ol", { class: "crumbs", "aria-label": "Where you are" });
    const area = element("div", { class: "chart" }), below = element("div", { class: "table" });
    host.replaceChildren(element("div", { class: "bar" }, crumbs, ...choices), area, below);
    const { drawn, draw } = chart(area, figure.label, options);
    drawn.on("click", (given) => nodeOf(given) && enter(nodeOf(given)));

    // A step towards a node: its parent first, where the node is not among the children of the current one.
    const enter = (each) => (children(each, order).length ? go(each) : each.from !== current && each.from && go(each.from));
    let redraw = () => 0;
    function go(to) {
      current = to;
      crumbs.replaceChildren(...path(to).map((each) => element("li", {},
        element("button", { type: "button", onclick: () => go(each), ...(each === to ? { "aria-current": "true" } : {}) }, cut(each.label, 80)))));
      choices.forEach((each) => each.setAttribute("aria-pressed", String(each.order === order)));
      const nodes = children(to, order);
      const inside = (nodes.length ? [...nodes] : [to]).sort((a, b) => b.bytes - a.bytes);
      const rows = inside.map((each) => [each.label, each.tensors, each.bytes, each.bytes, each]);
      const columns = [["inside", "text"], ["tensors", "count"], ["bytes", "bytes"], ["share", "share"]].map(([title, kind]) => ({ title, kind }));
      redraw = show(below, { id: "bytes", title: "Inside " + cut(to.label, 80), columns, rows: rows.map((row) => row.slice(0, 4)).map((row, at) => Object.assign(row, { node: rows[at][4] })) },
        (row) => row.node !== to && children(row.node, order).length ? () => go(row.node) : null);
      draw();
    }
    listeners.push(() => { draw(); return 0; });
    go(root);
    host.report = { root, children: (each) => children(each, order), get current() { return current; }, tiles, drawn };
  }

  // --- flow of bytes from the rules of one side to those of the other

  const LETTER = 6.7; // width of a letter of 11 pixels

  function sankey(host, figure) {
    const { links, others, bytes } = figure.data;
    const all = [...links.map(([from, to, what, amount]) => ({ from, to, what, amount })),
      ...others.map(([what, amount]) => ({ from: what, to: what, what: "", amount }))];
    const sides = [...new Set(all.map((each) => each.from))];
    const colours = (at) => COLOURS[at % COLOURS.length];
    const totals = (side) => {
      const sums = new Map();
      for (const each of all) sums.set(each[side], (sums.get(each[side]) || 0) + each.amount);
      return sums;
    };
    const nodes = (side, mark) => [...totals(side)].map(([text, amount]) => ({
      name: mark + text, text, amount, itemStyle: { color: side === "from" ? colours(sides.indexOf(text)) : css("--faint") },
      label: { position: side === "from" ? "left" : "right" },
    }));
    const area = element("div", { class: "chart" });
    area.style.height = Math.max(260, 24 * all.length + 200) + "px";
    host.replaceChildren(area);
    // Names stand beside the bands, which would run through them: on each side as far as the longest, or 3/8 of the width.
    const room = () => Math.max(10, Math.floor((area.clientWidth * 3 / 8 - 16) / LETTER));
    const names = (side) => [...totals(side).keys()].map((text) => ending(text, room()));
    const margin = (side) => 12 + Math.ceil(LETTER * Math.max(...names(side).map((text) => text.length)));
    const { drawn } = chart(area, figure.label, () => {
      const most = room();
      return {
        animation: false,
        tooltip: tooltip(({ data: each }) => each && (each.text
          ? [each.text, size(each.amount) + ", " + percent(each.amount, bytes) + " of all"]
          : [each.flow.from + " -> " + each.flow.to, each.flow.what, size(each.flow.amount)].filter(Boolean))),
        series: [{
          type: "sankey", left: margin("from"), right: margin("to"), top: 8, bottom: 8, nodeWidth: 8, nodeGap: 14, nodeAlign: "justify",
          draggable: false, emphasis: { focus: "adjacency" }, layoutIterations: 0,
          data: [...nodes("from", "<"), ...nodes("to", ">")],
          links: all.map((each) => ({ source: "<" + each.from, target: ">" + each.to, value: each.amount, flow: each,
            lineStyle: { color: colours(sides.indexOf(each.from)), opacity: matches([each.from, each.to]) ? 0.45 : 0.08 } })),
          label: { color: css("--ink"), fontSize: 11, fontFamily: css("--mono"), formatter: (each) => ending(each.data.text, most) },
        }],
      };
    });
    listeners.push(() => { charts.find((each) => each.drawn === drawn).draw(); return 0; });
    host.report = { all, drawn, names, margin };
  }

  const FIGURES = { treemap, sankey, ...window.maps({ COLOURS, INK, chart, charts, count, css, cut, element, ending, listeners, matches, percent, shortly, size, tooltip }) };
  for (const host of document.querySelectorAll("[data-figure]")) {
    const figure = data.figures[host.dataset.figure];
    FIGURES[figure.kind](host, figure);
  }
  for (const host of document.querySelectorAll("[data-table]"))
    listeners.push(show(host, data.tables.find((table) => table.id === host.dataset.table)));
})();
