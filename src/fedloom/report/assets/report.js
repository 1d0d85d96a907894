// A report: its curves, and every figure and its data to save.
(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("data").textContent);
  var charts = [], how = { x: "round", axes: data.axes, hidden: {} };

  function redraw() {
    charts.forEach(function (chart) { chart.destroy(); });
    charts = data.panels.map(function (panel, i) {
      return Curves.draw(panel, document.getElementById("panel-" + i), how);
    });
  }

  // A drawing of the page as a file: the page's own colours become fixed ones.
  function standalone(drawing) {
    var copy = drawing.cloneNode(true), box = drawing.viewBox.baseVal;
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", box.width);
    copy.setAttribute("height", box.height);
    copy.setAttribute("font-family", "sans-serif");
    copy.querySelectorAll("text").forEach(function (t) { t.setAttribute("fill", "#444"); t.setAttribute("font-size", "11"); });
    copy.querySelectorAll(".grid").forEach(function (l) { l.setAttribute("stroke", "#ddd"); });
    return copy.outerHTML.replace(/var\(--ink\)/g, "#000000").replace(/var\(--[a-z]+\)/g, "#888888");
  }

  // What a figure shows: drawn in the page, or an image that is SVG already.
  function drawing(figure) {
    var inside = figure.querySelector("svg");
    if (inside) return standalone(inside);
    var bytes = atob(figure.querySelector("img").src.split(",")[1]);
    return new TextDecoder().decode(Uint8Array.from(bytes, function (c) { return c.charCodeAt(0); }));
  }

  function name(button) {
    return button.dataset.name.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  }

  document.querySelectorAll("button[data-svg]").forEach(function (button) {
    button.addEventListener("click", function () {
      var panel = button.dataset.panel;
      var text = panel !== undefined ? Curves.svg(data.panels[+panel], how)
        : drawing(button.closest("figure"));
      Curves.save(name(button) + ".svg", text, "image/svg+xml");
    });
  });
  document.querySelectorAll("button[data-csv]").forEach(function (button) {
    button.addEventListener("click", function () {
      var panel = button.dataset.panel;
      var text = panel !== undefined ? Curves.csv([data.panels[+panel]], data.axes)
        : data.tables[button.dataset.csv];
      Curves.save(name(button) + ".csv", text, "text/csv");
    });
  });
  if (!data.panels.length) return;
  document.querySelectorAll("[data-method]").forEach(function (box) {
    box.addEventListener("change", function () {
      how.hidden[box.dataset.method] = !box.checked;
      redraw();
    });
  });
  var choice = document.getElementById("x-axis");
  choice.addEventListener("change", function () { how.x = choice.value; redraw(); });
  document.getElementById("csv").addEventListener("click", function () {
    Curves.save("curves.csv", Curves.csv(data.panels, data.axes), "text/csv");
  });
  redraw();
  var wait, width = window.innerWidth;
  window.addEventListener("resize", function () {
    if (window.innerWidth === width) return; // a phone's bars come and go
    width = window.innerWidth;
    clearTimeout(wait);
    wait = setTimeout(redraw, 150);
  });
  ["(prefers-color-scheme: dark)", "print"].forEach(function (media) { // other colours, other room
    window.matchMedia(media).addEventListener("change", redraw);
  });
})();
