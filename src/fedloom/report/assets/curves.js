// Curves with bands, drawn by uPlot: the same in reports and on the live page.
// A panel is {title, unit, lines: [{name, colour, dash, x: {axis: [...]}, mean, low, high}]}.
window.Curves = (function () {
  "use strict";
  var DASHES = { solid: [], dashed: [8, 4], dotted: [2, 3], dashdot: [8, 3, 2, 3] };
  var BORDERS = { solid: "solid", dashed: "dashed", dotted: "dotted", dashdot: "dashed" };

  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // Black on a dark page is the page's own ink.
  function ink(colour) {
    return colour.toLowerCase() === "#000000" ? css("--ink") : colour;
  }

  function number(v) {
    if (v == null) return "–";
    var size = Math.abs(v);
    return size >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
  }

  function swatch(line) {
    var out = document.createElement("span");
    out.className = "swatch";
    out.style.borderTop = "3px " + BORDERS[line.dash] + " " + ink(line.colour);
    return out;
  }

  // Lines may have different places on the x axis (bytes, seconds): put all into one table.
  function aligned(panel, x) {
    return uPlot.join(panel.lines.map(function (line) {
      return [line.x[x], line.mean, line.low || line.mean, line.high || line.mean];
    }));
  }

  function tooltip(lines, how) {
    var tip = document.createElement("div");
    tip.className = "tip";
    return { hooks: {
      init: function (u) {
        u.over.appendChild(tip);
        u.over.addEventListener("mouseleave", function () { tip.style.display = "none"; });
      },
      setCursor: function (u) {
        var i = u.cursor.idx;
        if (i == null) { tip.style.display = "none"; return; }
        tip.textContent = "";
        var head = document.createElement("b");
        head.textContent = how.axes[how.x] + " " + number(u.data[0][i]);
        tip.appendChild(head);
        lines.forEach(function (line, k) {
          var mean = u.data[1 + 3 * k][i];
          if (mean == null || how.hidden[line.name]) return;
          var low = u.data[2 + 3 * k][i], high = u.data[3 + 3 * k][i];
          var row = document.createElement("div");
          row.appendChild(swatch(line));
          var range = high > low ? " (" + number(low) + " – " + number(high) + ")" : "";
          row.appendChild(document.createTextNode(line.name + ": " + number(mean) + range));
          tip.appendChild(row);
        });
        tip.style.display = "block";
        var left = u.cursor.left, right = left + tip.offsetWidth + 16 > u.over.clientWidth;
        tip.style.left = Math.max(0, right ? left - tip.offsetWidth - 12 : left + 12) + "px";
        tip.style.top = Math.max(0, Math.min(u.cursor.top, u.over.clientHeight - tip.offsetHeight)) + "px";
      }
    } };
  }

  // how: {x, axes: {axis: label}, hidden: {name: true}, height}
  function draw(panel, place, how) {
    var series = [{}], bands = [];
    panel.lines.forEach(function (line) {
      var at = series.length, show = !how.hidden[line.name], colour = ink(line.colour);
      series.push({ label: line.name, stroke: colour, width: 2, dash: DASHES[line.dash],
                    spanGaps: true, show: show,
                    points: { show: line.mean.length < 3, size: 6, fill: colour } });
      for (var k = 0; k < 2; k++)
        series.push({ stroke: "transparent", width: 0, spanGaps: true, show: show,
                      points: { show: false } });
      bands.push({ series: [at + 2, at + 1], fill: colour + "22" });
    });
    var axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 },
                 ticks: { stroke: css("--line"), width: 1 } };
    var whole = how.x === "round" ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] } : {};
    return new uPlot({
      width: Math.max(place.clientWidth, 200), height: how.height || 260, legend: { show: false },
      scales: { x: { time: false } }, series: series, bands: bands,
      plugins: [tooltip(panel.lines, how)],
      axes: [Object.assign({ label: how.axes[how.x], labelSize: 20 }, axis, whole),
             Object.assign({ label: panel.unit, labelSize: 20, size: 52 }, axis)],
      cursor: { drag: { x: true, y: true, uni: 20 } }
    }, aligned(panel, how.x), place);
  }

  // New values in a chart that is there; a zoom stays.
  function update(chart, panel, how) {
    var xs = chart.data[0], x = chart.scales.x, slack = 1e-9 * (xs[xs.length - 1] - xs[0]);
    var zoomed = xs.length > 1 && (x.min > xs[0] + slack || x.max < xs[xs.length - 1] - slack);
    chart.setData(aligned(panel, how.x), !zoomed);
    if (zoomed) chart.redraw();
  }

  function ticks(low, high, most) {
    var step = Math.pow(10, Math.floor(Math.log10((high - low) / most || 1)));
    [2, 5, 10].forEach(function (k) { if ((high - low) / step > most) step = k * Math.pow(10, Math.floor(Math.log10(step))); });
    var out = [];
    for (var v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) out.push(+v.toPrecision(12));
    return out;
  }

  function escaped(text) {
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");
  }

  // The same panel as an SVG file, black on white, with a legend.
  function svg(panel, how) {
    var lines = panel.lines.filter(function (l) { return !how.hidden[l.name]; });
    var W = 640, H = 360, L = 60, R = 16, T = 30, B = 46, legend = 18 * lines.length;
    var xs = [], ys = [];
    lines.forEach(function (l) {
      xs = xs.concat(l.x[how.x]);
      ys = ys.concat(l.low || l.mean, l.high || l.mean);
    });
    ys = ys.filter(function (v) { return v != null; });
    var x0 = Math.min.apply(null, xs), x1 = Math.max.apply(null, xs);
    var y0 = Math.min.apply(null, ys), y1 = Math.max.apply(null, ys);
    if (x1 === x0) { x0 -= 0.5; x1 += 0.5; }
    if (y1 === y0) { y0 -= 0.5; y1 += 0.5; }
    function px(v) { return (L + (v - x0) / (x1 - x0) * (W - L - R)).toFixed(1); }
    function py(v) { return (H - B - (v - y0) / (y1 - y0) * (H - T - B)).toFixed(1); }
    var out = ["<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 " + W + " " + (H + legend) + "' font-family='sans-serif' font-size='12'>",
      "<rect width='100%' height='100%' fill='#fff'/>",
      "<text x='" + L + "' y='18' font-weight='bold'>" + escaped(panel.title) + "</text>"];
    ticks(x0, x1, 8).forEach(function (v) {
      out.push("<line x1='" + px(v) + "' x2='" + px(v) + "' y1='" + T + "' y2='" + (H - B) + "' stroke='#ddd'/><text x='" + px(v) + "' y='" + (H - B + 16) + "' text-anchor='middle'>" + number(v) + "</text>");
    });
    ticks(y0, y1, 6).forEach(function (v) {
      out.push("<line x1='" + L + "' x2='" + (W - R) + "' y1='" + py(v) + "' y2='" + py(v) + "' stroke='#ddd'/><text x='" + (L - 6) + "' y='" + (+py(v) + 4) + "' text-anchor='end'>" + number(v) + "</text>");
    });
    lines.forEach(function (l, k) {
      var at = l.mean.map(function (_, i) { return i; }).filter(function (i) { return l.mean[i] != null; });
      function path(values) { return at.map(function (i) { return px(l.x[how.x][i]) + "," + py(values[i]); }); }
      if (l.low) out.push("<polygon fill='" + l.colour + "' fill-opacity='.14' points='" + path(l.low).concat(path(l.high).reverse()).join(" ") + "'/>");
      var dash = DASHES[l.dash].join(" "), style = "stroke='" + l.colour + "' stroke-width='2' fill='none'" + (dash ? " stroke-dasharray='" + dash + "'" : "");
      out.push("<polyline " + style + " points='" + path(l.mean).join(" ") + "'/>");
      var y = H + 18 * k + 4;
      out.push("<line x1='" + L + "' x2='" + (L + 30) + "' y1='" + y + "' y2='" + y + "' " + style + "/><text x='" + (L + 38) + "' y='" + (y + 4) + "'>" + escaped(l.name) + "</text>");
    });
    out.push("<text x='" + ((L + W - R) / 2) + "' y='" + (H - B + 34) + "' text-anchor='middle'>" + escaped(how.axes[how.x]) + "</text>",
      "<text transform='translate(14," + ((T + H - B) / 2) + ") rotate(-90)' text-anchor='middle'>" + escaped(panel.unit) + "</text></svg>");
    return out.join("\n");
  }

  function csv(panels, axes) {
    function quote(t) { return '"' + String(t).replace(/"/g, '""') + '"'; }
    var rows = [["score", "method"].concat(Object.keys(axes), ["mean", "low", "high"]).join(",")];
    panels.forEach(function (panel) {
      panel.lines.forEach(function (line) {
        line.mean.forEach(function (mean, i) {
          if (mean == null) return;
          var at = Object.keys(axes).map(function (key) { return line.x[key][i]; });
          rows.push([quote(panel.title), quote(line.name)].concat(at, [mean, (line.low || line.mean)[i], (line.high || line.mean)[i]]).join(","));
        });
      });
    });
    return rows.join("\n") + "\n";
  }

  function save(name, text, kind) {
    var link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 1000);
  }

  return { css: css, ink: ink, number: number, swatch: swatch, draw: draw, update: update, svg: svg, csv: csv,
           save: save };
})();
