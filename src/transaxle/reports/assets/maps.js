"use strict";
// Figures of a report that are made of cells, bars and boxes. `page.js` gives the tools, and draws what this returns.
window.maps = ({ COLOURS, INK, chart, charts, count, css, cut, element, ending, listeners, matches, percent, shortly, size, tooltip }) => {
  // One hue from little to much: told apart by their lightness alone, away from the paper in either scheme.
  const LIGHT = ["#d6e4f0", "#a9cbe4", "#6fa8d3", "#3b82bd", "#1d5c98", "#0a3366"];
  const DARK = ["#1c3550", "#2a5580", "#3d79b0", "#6aa2d4", "#a3c8e8", "#e0effa"];
  const dark = () => matchMedia("(prefers-color-scheme: dark)").matches && !matchMedia("print").matches;
  const WAYS = { number: shortly, count, bytes: size, share: (value) => percent(Number(value), 1) };

  const ramp = (bounds) => {
    const colours = dark() ? DARK : LIGHT;
    if (bounds.length >= colours.length) throw Error("two ranges would have one colour");
    return Array.from({ length: bounds.length + 1 }, (_, at) =>
      colours[bounds.length ? Math.round(at * (colours.length - 1) / bounds.length) : colours.length - 1]);
  };
  const binOf = (value, bounds) => {
    const given = Number(value);
    return Number.isNaN(given) ? bounds.length : bounds.filter((bound) => given >= bound).length;
  };
  const ranges = ({ bounds, kind, labels }) => {
    if (labels) return labels;
    const shown = bounds.map(WAYS[kind]);
    const all = kind === "share" && bounds.at(-1) === 1;
    return ["below " + shown[0], ...shown.slice(1).map((bound, at) => shown[at] + " to " + bound), all ? "all" : shown.at(-1) + " or more"];
  };

  // What most names end with tells nothing.
  const rowName = (name, most) => ending(name.replace(/(.)\.weight$/, "$1"), most);

  const redrawn = (drawn) => charts.find((each) => each.drawn === drawn).draw();
  const choices = (names, choose) => {
    const made = names.map((name, at) => element("button", { type: "button", onclick: () => choose(at) }, name));
    return { made, press: (chosen) => made.forEach((each, at) => each.setAttribute("aria-pressed", String(at === chosen))) };
  };

  const noted = (notes, at) => (notes && notes[at] ? " (" + notes[at] + ")" : "");

  // --- cells in rows and columns, coloured by one of several measures; a cell in a state has no colour of a measure

  function heat(host, figure) {
    const { columns, rows, across, notes, measures, states, cells } = figure.data;
    let chosen = 0;
    const area = element("div", { class: "chart" }), legend = element("ul", { class: "legend" });
    const { made, press } = choices(measures.map((each) => each.title), choose);
    host.replaceChildren(element("div", { class: "bar" }, ...(measures.length > 1 ? made : [])), area, legend);
    const tall = Math.max(12, Math.min(22, Math.floor(900 / rows.length)));
    area.style.height = tall * rows.length + 46 + "px";

    const used = new Set(cells.map(([, , state]) => state).filter(Boolean));
    function describe() {
      const measure = measures[chosen], colours = ramp(measure.bounds);
      const shades = ranges(measure);
      const swatch = (text, colour, state) => {
        const box = element("i", state ? { class: state } : {});
        if (colour) box.style.background = colour;
        return element("li", {}, box, text);
      };
      legend.setAttribute("aria-label", measure.title);
      legend.replaceChildren(
        ...Object.entries(states).filter(([state]) => used.has(state)).map(([state, text]) => swatch(text, "", state)),
        ...shades.map((text, at) => swatch(text, colours[at])));
    }
    const shape = (place) => {
      const gap = place.width > 4 && place.height > 4 ? 1 : 0;
      return { x: place.x, y: place.y, width: Math.max(place.width - gap, 0.5), height: Math.max(place.height - gap, 0.5) };
    };
    const render = (_, api) => {
      const [column, row, state, values] = cells[api.value(2)];
      const [x, y] = api.coord([column, row]), [width, height] = api.size([1, 1]);
      const box = shape({ x: x - width / 2, y: y - height / 2, width, height });
      const opacity = matches([rows[row]]) ? 1 : 0.12;
      if (state === "equal")
        return { type: "rect", shape: { ...box, x: box.x + 0.5, y: box.y + 0.5, width: box.width - 1, height: box.height - 1 }, style: { fill: "transparent", stroke: css("--faint"), lineWidth: 0.5, opacity } };
      const rect = { type: "rect", shape: box, style: { fill: state ? css("--soft") : ramp(measures[chosen].bounds)[binOf(values[chosen], measures[chosen].bounds)], opacity } };
      if (!state) return rect;
      const line = { x1: box.x, y1: box.y + box.height, x2: box.x + box.width, y2: box.y };
      return { type: "group", children: [rect, { type: "line", shape: line, style: { stroke: css("--faint"), lineWidth: 1, opacity } }] };
    };
    const options = () => {
      const narrow = area.clientWidth < 640, room = narrow ? 96 : 190;
      const axis = (names) => ({
        type: "category", data: names, axisTick: { show: false }, axisLine: { show: false }, splitLine: { show: false },
        axisLabel: { color: css("--ink"), fontSize: 11, hideOverlap: true },
      });
      const left = axis(rows.map((name) => rowName(name, narrow ? 12 : 29)));
      Object.assign(left.axisLabel, { interval: tall < 12 ? "auto" : 0, width: room - 8, overflow: "truncate" });
      return {
        animation: false,
        tooltip: tooltip(({ data: each }) => {
          if (!each) return null;
          const [column, row, state, values, lines] = cells[each[2]];
          const where = columns[column].match(/^\d+$/) ? across + " " + columns[column] : columns[column];
          const told = state ? [states[state]] : measures.map((measure, at) => measure.title + " " + WAYS[measure.kind](values[at]));
          return [rows[row] + " / " + where + noted(notes, column), ...told, ...lines];
        }),
        grid: { left: room, right: 4, top: 4, bottom: 40, containLabel: false },
        xAxis: { ...axis(columns), name: across, nameLocation: "middle", nameGap: 24, nameTextStyle: { color: css("--faint"), fontSize: 11 } },
        yAxis: { ...left, inverse: true },
        series: [{ type: "custom", renderItem: render, encode: { x: 0, y: 1 }, data: cells.map(([column, row], at) => [column, row, at]) }],
      };
    };
    const { drawn } = chart(area, figure.label, options);
    function choose(at) {
      chosen = at;
      press(at);
      describe();
      redrawn(drawn);
    }
    choose(0);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", describe);
    listeners.push(() => { redrawn(drawn); return 0; });
    host.report = { cells, drawn, choose, colour: (at) => ramp(measures[chosen].bounds)[binOf(cells[at][3][chosen], measures[chosen].bounds)] };
  }

  // --- bars of one of several series

  function bars(host, figure) {
    const { series } = figure.data;
    let chosen = 0;
    const area = element("div", { class: "chart low" });
    const { made, press } = choices(series.map((each) => each.title), choose);
    host.replaceChildren(element("div", { class: "bar" }, ...(series.length > 1 ? made : [])), area);
    const value = (bar) => bar.at(-1);
    const way = () => WAYS[series[chosen].kind || "count"];
    // (from, below, how many), or (label, how much)
    const name = (bar) => (bar.length === 2 ? cut(bar[0], 40) : bound(bar));
    const bound = ([low, high]) => (low === "Infinity" ? "∞" : !Number(high) ? "0" : shortly(low));
    const range = (bar) => (bar.length === 2 || bar[0] === "Infinity" || !Number(bar[1]) ? name(bar) : shortly(bar[0]) + " to " + shortly(bar[1]));
    const options = () => ({
      animation: false,
      tooltip: tooltip(({ dataIndex: at }) => {
        const bar = series[chosen].bars[at];
        const unit = series[chosen].kind ? "" : value(bar) === 1 ? " element" : " elements";
        return bar && [series[chosen].title + " " + range(bar) + noted(series[chosen].notes, at), way()(value(bar)) + unit];
      }),
      grid: { left: 64, right: 8, top: 30, bottom: 42 },
      xAxis: { type: "category", data: series[chosen].bars.map(name), axisTick: { show: false }, axisLine: { lineStyle: { color: css("--line") } },
        axisLabel: { color: css("--ink"), fontSize: 11, hideOverlap: true }, name: series[chosen].title, nameLocation: "middle", nameGap: 26,
        nameTextStyle: { color: css("--faint"), fontSize: 11 } },
      yAxis: { type: "value", minInterval: 1, name: series[chosen].of, nameGap: 12, nameTextStyle: { color: css("--faint"), fontSize: 11 }, axisLabel: { color: css("--ink"), fontSize: 11, formatter: (each) => (series[chosen].kind ? way()(each) : each < 1e4 ? count(each) : each.toLocaleString("en-US", { notation: "compact" })) },
        splitLine: { lineStyle: { color: css("--line") } } },
      series: [{ type: "bar", data: series[chosen].bars.map(value), itemStyle: { color: css("--bar") }, barCategoryGap: "12%" }],
    });
    const { drawn } = chart(area, figure.label, options);
    function choose(at) {
      chosen = at;
      press(at);
      redrawn(drawn);
    }
    choose(0);
    host.report = { series, drawn };
  }

  // --- axes of a rule in names and dims, before and after: an axis has one colour, and is pale where it stays

  function moves(host, figure) {
    const { rules, meanings, sizes } = figure.data;
    const drawRule = ({ tensors, what, steps, moved, before, after }) => {
      const chip = (axis) => {
        const made = element("span", { class: moved.includes(axis) ? "axis moved" : "axis" }, cut(axis, 40));
        if (moved.includes(axis)) {
          made.style.background = COLOURS[moved.indexOf(axis) % COLOURS.length];
          made.style.color = INK;
        }
        made.title = [meanings[axis], axis in sizes ? count(sizes[axis]) : ""].filter(Boolean).join(": ");
        return made;
      };
      const place = (title, words) => element("span", { class: "place" }, element("small", {}, title), ...words);
      const line = (side, { rule, name, dims }) => element("div", { class: "arranged" },
        element("span", { class: "side" }, side),
        ...(name.length ? [place("name", name.map(chip))] : []),
        ...dims.map((words, at) => place("dim " + at, words.length ? words.map(([text, axis]) => (axis ? chip(text) : element("span", {}, cut(text, 80)))) : ["1"])),
        element("code", {}, cut(rule, 240)));
      return element("div", { class: "moves" }, element("p", {}, element("strong", {}, cut(tensors, 240)), " · " + cut(what, 240)),
        ...before.map((each) => line("source", each)),
        element("p", { class: "steps" }, "↓ " + cut(steps.join(", "), 400)),
        line("target", after));
    };
    const all = rules.map(drawRule);
    host.replaceChildren(...all);
    const texts = rules.map((each) => [each.tensors, each.after.rule, ...each.before.map(({ rule }) => rule)]);
    listeners.push(() => { all.forEach((each, at) => (each.hidden = !matches(texts[at]))); return 0; });
    host.report = { rules };
  }

  return { heat, bars, moves };
};
