// The curves of a report: one uPlot per score, the same methods in all of them.
(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("data").textContent);
  var hidden = {}, charts = [], x = "round";

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

  // Methods may have different places on the x axis (bytes, seconds): put all into one table.
  function aligned(panel) {
    var tables = panel.lines.map(function (line) {
      return [line.x[x], line.mean, line.low, line.high];
    });
    return uPlot.join(tables);
  }

  function tooltip(lines) {
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
        head.textContent = data.axes[x] + " " + number(u.data[0][i]);
        tip.appendChild(head);
        lines.forEach(function (line, k) {
          var mean = u.data[1 + 3 * k][i];
          if (mean == null || hidden[line.name]) return;
          var low = u.data[2 + 3 * k][i], high = u.data[3 + 3 * k][i];
          var row = document.createElement("div"), swatch = document.createElement("span");
          swatch.className = "swatch";
          swatch.style.borderTop = "3px " + line.style + " " + ink(line.colour);
          row.appendChild(swatch);
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

  function draw(panel, place) {
    var dashes = { solid: [], dashed: [8, 4], dotted: [2, 3], dashdot: [8, 3, 2, 3] };
    var series = [{}], bands = [];
    panel.lines.forEach(function (line) {
      var at = series.length, show = !hidden[line.name], colour = ink(line.colour);
      series.push({ label: line.name, stroke: colour, width: 2, dash: dashes[line.dash],
                    spanGaps: true, show: show,
                    points: { show: line.mean.length < 3, size: 6, fill: colour } });
      for (var k = 0; k < 2; k++)
        series.push({ stroke: "transparent", width: 0, spanGaps: true, show: show,
                      points: { show: false } });
      bands.push({ series: [at + 2, at + 1], fill: colour + "22" });
    });
    var axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 },
                 ticks: { stroke: css("--line"), width: 1 } };
    var whole = x === "round" ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] } : {};
    return new uPlot({
      width: Math.max(place.clientWidth, 200), height: 260, legend: { show: false },
      scales: { x: { time: false } }, series: series, bands: bands, plugins: [tooltip(panel.lines)],
      axes: [Object.assign({ label: data.axes[x], labelSize: 20 }, axis, whole),
             Object.assign({ label: panel.unit, labelSize: 20, size: 52 }, axis)],
      cursor: { drag: { x: true, y: true, uni: 20 } }
    }, aligned(panel), place);
  }

  function redraw() {
    charts.forEach(function (chart) { chart.destroy(); });
    charts = data.panels.map(function (panel, i) {
      return draw(panel, document.getElementById("panel-" + i));
    });
  }

  function save(name, text) {
    var link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name;
    link.click();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 1000);
  }

  if (data.panels.length) {
    document.querySelectorAll("[data-method]").forEach(function (box) {
      box.addEventListener("change", function () {
        hidden[box.dataset.method] = !box.checked;
        redraw();
      });
    });
    var choice = document.getElementById("x-axis");
    if (choice) choice.addEventListener("change", function () { x = choice.value; redraw(); });
    document.getElementById("csv").addEventListener("click", function () {
      var quote = function (t) { return '"' + String(t).replace(/"/g, '""') + '"'; };
      var lines = [["score", "method"].concat(Object.keys(data.axes), ["mean", "low", "high"]).join(",")];
      data.panels.forEach(function (panel) {
        panel.lines.forEach(function (line) {
          line.mean.forEach(function (mean, i) {
            var at = Object.keys(data.axes).map(function (key) { return line.x[key][i]; });
            lines.push([quote(panel.title), quote(line.name)].concat(at, [mean, line.low[i], line.high[i]]).join(","));
          });
        });
      });
      save("curves.csv", lines.join("\n") + "\n");
    });
    redraw();
    var wait;
    window.addEventListener("resize", function () { clearTimeout(wait); wait = setTimeout(redraw, 150); });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }
})();
