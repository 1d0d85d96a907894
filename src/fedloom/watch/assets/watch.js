// The live page: a list of runs that follows the server's events, curves of those that are ticked,
// and one run in full. What is ticked and open is in the address, so a reload shows the same.
(function () {
  "use strict";
  var $ = function (id) { return document.getElementById(id); };
  var DASH = { "-": "solid", "--": "dashed", "-.": "dashdot", ":": "dotted" };
  var PANELS = [["test", "Common test set"], // without a unit: in the measure of the task
    ["macro", "Clients' own test data"],
    ["worst10", "Worst 10 % of clients"],
    ["new_macro", "Newcomers"],
    ["train_loss", "Training loss", "loss"],
    ["degree", "Nodes met in a round", "nodes"],
    ["dominating", "Size of the dominating sets", "nodes"]];
  var SHARED = ["degree", "dominating"]; // whatever the task is, these can be on one axis
  var AXES = { round: "round", MB: "MB sent and received", s: "seconds of computing" };
  var runs = {}, groups = {}, rows = {}, boxes = {}, data = {};
  var ticked = [], open = null, charts = {}, how = { x: "round", axes: AXES, hidden: {}, height: 240 };

  // -- what is ticked and open, in the address
  function readHash() {
    var words = new URLSearchParams(location.hash.slice(1));
    ticked = (words.get("runs") || "").split(",").filter(Boolean);
    open = words.get("open");
  }
  function writeHash() {
    var words = [];
    if (ticked.length) words.push("runs=" + ticked.join(","));
    if (open) words.push("open=" + open);
    history.replaceState(null, "", words.length ? "#" + words.join("&") : location.pathname);
  }

  // -- the list
  function element(kind, cls, text) {
    var out = document.createElement(kind);
    if (cls) out.className = cls;
    if (text !== undefined) out.textContent = text;
    return out;
  }
  function set(node, text) { if (node.textContent !== text) node.textContent = text; }

  function duration(s) {
    if (s == null) return "";
    if (s < 60) return Math.ceil(s) + " s";
    if (s < 3600) return Math.round(s / 60) + " min";
    return s < 172800 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " days";
  }
  function score(run) {
    var s = run.scored, v = s.macro !== undefined ? s.macro : s.test;
    if (v === undefined) return "";
    return run.measure.unit ? v.toFixed(2) + " " + run.measure.unit : run.measure.called + " " + Curves.number(v);
  }

  function rounds(run) { // how many there should be is in its config
    return run.rounds ? run.done + " / " + run.rounds : run.done === 1 ? "1 round" : run.done + " rounds";
  }

  function makeRow(id) {
    var row = element("div", "run"), box = element("input");
    box.type = "checkbox";
    var name = element("button"), line = element("div", "line");
    name.type = "button";
    row.box = box;
    row.name = name;
    row.score = element("span", "score");
    row.state = element("span", "state");
    row.bar = element("progress");
    row.rounds = element("span");
    row.left = element("span");
    row.wrong = element("div", "wrong");
    line.append(row.state, row.bar, row.rounds, row.left);
    row.append(box, name, row.score, line, row.wrong);
    row.dataset.id = id;
    box.addEventListener("change", function () { tick(id, box.checked); });
    name.addEventListener("click", function () { show(id); });
    return row;
  }

  function fillRow(run) {
    var row = rows[run.id];
    set(row.name, run.name);
    row.name.title = run.path;
    row.box.setAttribute("aria-label", "compare " + run.name);
    set(row.score, score(run));
    row.score.title = run.scored.macro !== undefined ? "clients' own test data" : "common test set";
    row.state.className = "state " + run.state;
    set(row.state, run.state);
    row.bar.hidden = !run.rounds;
    row.bar.max = run.rounds || 1;
    row.bar.value = run.done;
    set(row.rounds, rounds(run));
    set(row.wrong, run.wrong || run.ended);
    row.wrong.hidden = !row.wrong.textContent;
    set(row.left, run.left == null ? "" : duration(run.left) + " left");
    row.box.checked = ticked.indexOf(run.id) >= 0;
    row.classList.toggle("open", open === run.id);
  }

  function groupBox(name) {
    if (!boxes[name]) {
      var box = element("details", "group"), head = element("summary");
      box.open = true;
      box.label = element("span", "", name || "runs");
      box.count = element("span", "small");
      box.all = element("button", "", "select all");
      box.all.type = "button";
      box.all.addEventListener("click", function (e) {
        e.preventDefault();
        Object.values(runs).forEach(function (r) {
          if (r.group === name && !rows[r.id].hidden && ticked.indexOf(r.id) < 0 && ticked.length < LOOKS.length) ticked.push(r.id);
        });
        changed();
      });
      box.link = element("a", "", "report");
      box.link.target = "_blank";
      box.link.rel = "noopener";
      head.append(box.label, " ", box.count, " ", box.link, " ", box.all);
      box.append(head);
      boxes[name] = box;
      var after = Object.keys(boxes).sort().find(function (n) { return n > name; });
      $("runs").insertBefore(box, after === undefined ? null : boxes[after]);
    }
    return boxes[name];
  }

  function list() {
    var words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean), inside = {};
    Object.values(runs).sort(function (a, b) {
      return (b.state === "running") - (a.state === "running") || (a.name < b.name ? -1 : 1);
    }).forEach(function (run) {
      if (!rows[run.id]) rows[run.id] = makeRow(run.id);
      var box = groupBox(run.group), row = rows[run.id];
      var text = (run.group + " " + run.name + " " + run.method + " " + run.data + " " + run.state).toLowerCase();
      row.hidden = !words.every(function (w) { return text.indexOf(w) >= 0; });
      fillRow(run);
      var mine = inside[run.group] = inside[run.group] || [];
      if (box.children[mine.length + 1] !== row) box.insertBefore(row, box.children[mine.length + 1] || null);
      mine.push(run);
    });
    Object.keys(boxes).forEach(function (name) {
      var mine = inside[name], about = groups[name] || {};
      if (!mine) { boxes[name].remove(); delete boxes[name]; return; }
      var done = mine.filter(function (r) { return r.state === "finished"; }).length;
      set(boxes[name].count, (about.kind && about.kind !== "folder" ? about.kind + ", " : "") +
        done + " of " + Math.max(about.planned || 0, mine.length) + " finished");
      boxes[name].link.hidden = !about.kind || about.kind === "folder" || !done;
      boxes[name].link.href = "/report/" + about.id;
      boxes[name].hidden = mine.every(function (r) { return rows[r.id].hidden; });
    });
    $("empty").hidden = Object.keys(runs).length > 0;
    $("hint").hidden = ticked.length > 0 || open !== null;
  }

  // -- curves
  function tick(id, on) {
    ticked = ticked.filter(function (t) { return t !== id; });
    if (on) ticked.push(id);
    changed();
  }
  function show(id) {
    open = open === id ? null : id;
    if (open && !ticked.length) ticked.push(open);
    changed();
    if (open && window.innerWidth < 1024) $("one").scrollIntoView({ behavior: "smooth" });
  }
  function changed() {
    writeHash();
    list();
    wanted().forEach(load);
    draw();
    detail();
  }
  function wanted() {
    return ticked.concat(open && ticked.indexOf(open) < 0 ? [open] : []).filter(function (id) { return runs[id]; });
  }

  function load(id) {
    var known = data[id], run = runs[id];
    if (known && (known.loading || known.version === run.version)) return;
    known = data[id] = known || { version: -1, rounds: 0, round: [], MB: [], s: [], scores: {} };
    known.loading = true;
    fetch("/api/runs/" + id + "?since=" + known.round.length).then(function (answer) {
      if (!answer.ok) throw answer;
      return answer.json();
    }).then(function (news) {
      known.loading = false;
      if (news.start === 0) { known.round = []; known.MB = []; known.s = []; known.scores = {}; }
      var before = news.start;
      ["round", "MB", "s"].forEach(function (k) { known[k] = known[k].slice(0, before).concat(news[k]); });
      Object.keys(news.scores).forEach(function (k) {
        var old = known.scores[k] || new Array(before).fill(null);
        known.scores[k] = old.slice(0, before).concat(news.scores[k]);
      });
      known.version = news.version;
      known.more = news;
      draw();
      if (id === open) detail();
      if (runs[id] && runs[id].version !== news.version) load(id);
    }).catch(function () { known.loading = false; });
  }

  function labels() {
    var names = ticked.map(function (id) { return runs[id].name; });
    return ticked.map(function (id, i) {
      var twice = names.indexOf(names[i]) !== names.lastIndexOf(names[i]);
      return twice && runs[id].group ? runs[id].group + "/" + names[i] : names[i];
    });
  }

  // Runs of different tasks have a chart each: an accuracy and an error have no axis in common.
  function panels() {
    var called = [];
    ticked.forEach(function (id) {
      var name = runs[id].measure.called;
      if (runs[id].done && called.indexOf(name) < 0) called.push(name);
    });
    set($("apart"), called.length < 2 ? "" : "These runs are scored by different measures (" + called.join(", ") + "): each has its own charts.");
    var out = [];
    PANELS.forEach(function (p) {
      if (called.length < 2 || SHARED.indexOf(p[0]) >= 0) out.push({ key: p[0], score: p[0], title: p[1], unit: p[2], called: null });
      else called.forEach(function (name) {
        var title = p[1] + (p[2] ? ", runs scored by " : ", ") + name;
        out.push({ key: p[0] + " " + name, score: p[0], title: title, unit: p[2], called: name });
      });
    });
    return out;
  }

  function lines(key, called) {
    var names = labels(), families = {}, order = [];
    ticked.forEach(function (id, i) {
      var d = data[id];
      var family = $("join").checked ? names[i].replace(/-s\d+$/, "") : names[i];
      if (order.indexOf(family) < 0) order.push(family);
      if (!d || !d.scores[key] || (called && runs[id].measure.called !== called)) return;
      (families[family] = families[family] || []).push(d);
    });
    var style = function (i) { var l = LOOKS[i % LOOKS.length]; return { colour: l.color, dash: DASH[l.linestyle] }; };
    return order.map(function (family, i) {
      var found = families[family];
      if (!found) return null;
      var at = {};
      found.forEach(function (d) {
        d.scores[key].forEach(function (v, k) {
          if (v == null) return;
          var spot = at[d.round[k]] = at[d.round[k]] || { v: [], MB: 0, s: 0 };
          spot.v.push(v);
          spot.MB += d.MB[k] / found.length;
          spot.s += d.s[k] / found.length;
        });
      });
      var rounds = Object.keys(at).map(Number).filter(function (r) { return at[r].v.length === found.length; })
        .sort(function (a, b) { return a - b; });
      var pick = function (f) { return rounds.map(function (r) { return f(at[r].v); }); };
      return Object.assign(style(i), { name: family,
        x: { round: rounds, MB: rounds.map(function (r) { return at[r].MB; }), s: rounds.map(function (r) { return at[r].s; }) },
        mean: pick(function (v) { return v.reduce(function (a, b) { return a + b; }) / v.length; }),
        low: pick(function (v) { return Math.min.apply(null, v); }),
        high: pick(function (v) { return Math.max.apply(null, v); }) });
    }).filter(function (line) { return line && line.mean.length; });
  }

  function draw() {
    ticked = ticked.filter(function (id) { return runs[id]; });
    $("compare").hidden = !ticked.length;
    if (!ticked.length) { clear(); return; }
    var names = labels(), families = names.map(function (n) { return n.replace(/-s\d+$/, ""); });
    $("joined").hidden = new Set(families).size === names.length;
    if ($("joined").hidden) $("join").checked = false;
    var legend = $("legend"), shownNames = [], used = $("join").checked ? families : names;
    legend.textContent = "";
    used.forEach(function (name) {
      if (shownNames.indexOf(name) >= 0) return;
      var l = LOOKS[shownNames.length % LOOKS.length], item = element("span", "item");
      item.append(Curves.swatch({ colour: l.color, dash: DASH[l.linestyle] }), name);
      legend.append(item);
      shownNames.push(name);
    });
    var parts = panels();
    $("together").hidden = ticked.length < 2 || $("apart").textContent !== "";
    $("together").href = "/report/" + ticked.join(",");
    var at = 0, kept = {};
    parts.forEach(function (p) {
      var found = lines(p.score, p.called), old = charts[p.key];
      if (!found.length) return;
      kept[p.key] = true;
      var shape = how.x + "|" + found.map(function (l) { return l.name; }).join("|");
      var mine = ticked.map(function (id) { return runs[id].measure; }).filter(function (m) { return !p.called || m.called === p.called; });
      var panel = { title: p.title, unit: p.unit || mine[0].axis, lines: found };
      var box = old ? old.box : element("div", "chart");
      if (!old) {
        box.append(element("h3", "", p.title), element("div"));
        box.dataset.score = p.score;
      }
      if ($("charts").children[at] !== box) $("charts").insertBefore(box, $("charts").children[at] || null);
      at += 1;
      if (old && old.shape === shape) { old.panel = panel; Curves.update(old.plot, panel, how); return; }
      if (old) old.plot.destroy();
      charts[p.key] = { box: box, shape: shape, panel: panel, plot: Curves.draw(panel, box.lastChild, how) };
    });
    Object.keys(charts).forEach(function (key) {
      if (kept[key]) return;
      charts[key].plot.destroy();
      charts[key].box.remove();
      delete charts[key];
    });
    Object.values(charts).forEach(function (chart) { // more charts leave less room for each
      var room = chart.box.clientWidth;
      if (room && chart.plot.width !== room) chart.plot.setSize({ width: room, height: how.height });
    });
  }
  function clear() {
    Object.keys(charts).forEach(function (k) { charts[k].plot.destroy(); charts[k].box.remove(); });
    charts = {};
  }
  function redraw() { clear(); draw(); detail(); }

  // -- one run
  function detail() {
    var run = open && runs[open];
    $("one").hidden = !run;
    if (!run) { film.leave(); return; }
    set($("one-name"), run.name);
    var words = [run.method, "on " + run.data, run.clients + " clients", "seed " + run.seed,
      "round " + run.done + " of " + run.rounds];
    if (run.last.participants) words.push(run.last.participants + " clients in the last round");
    if (run.left != null) words.push("about " + duration(run.left) + " left");
    var state = $("one-state");
    state.textContent = "";
    state.append(element("span", "state " + run.state, run.ended || run.state), " · " + (run.wrong ? rounds(run) + " · " + run.wrong : words.join(", ")));
    $("stop").hidden = run.state !== "running" && run.state !== "stopping";
    $("stop").disabled = run.state === "stopping";
    set($("stop"), run.state === "stopping" ? "stopping after this round …" : "stop after this round");
    $("report").href = "/report/" + run.id;
    $("report").hidden = run.done === 0 || run.state === "damaged";
    set($("report"), run.state === "finished" ? "report" : "report so far");
    if (run.resume && run.done < run.rounds) set($("said"), "Resume with: " + run.resume);
    else if (run.state !== "stopping") set($("said"), "");
    var more = data[run.id] && data[run.id].more;
    if (!more) return;
    var log = $("log"), end = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    set(log, more.log.join("\n"));
    if (end) log.scrollTop = log.scrollHeight;
    var body = $("settings");
    body.textContent = "";
    Object.keys(more.settings).forEach(function (key) {
      var row = element("tr"), value = element("td", "", more.settings[key]);
      value.style.textAlign = "left";
      row.append(element("td", "", key), value);
      body.append(row);
    });
    squares(run, more);
    $("network").hidden = !run.last.network;
    if (run.last.network) film.visit(run, more.names); else film.leave();
  }

  // A square for every client, darker the more often it took part.
  function squares(run, more) {
    var counts = more.took_part, canvas = $("squares");
    $("part").hidden = run.last.network || counts.length < 2 || run.done === 0;
    if ($("part").hidden) return;
    var room = $("one").clientWidth, size = counts.length > 400 ? 7 : 13, across = Math.max(Math.floor(room / size), 1);
    var scale = window.devicePixelRatio || 1, down = Math.ceil(counts.length / across);
    var width = Math.min(across, counts.length) * size;
    canvas.width = width * scale;
    canvas.height = down * size * scale;
    canvas.style.width = width + "px";
    var g = canvas.getContext("2d"), most = Math.max.apply(null, counts) || 1;
    g.scale(scale, scale);
    counts.forEach(function (n, i) {
      var x = i % across * size, y = Math.floor(i / across) * size;
      g.globalAlpha = 1;
      g.strokeStyle = Curves.css("--line");
      g.strokeRect(x + .5, y + .5, size - 2, size - 2);
      g.globalAlpha = n ? .15 + .85 * n / most : 0;
      g.fillStyle = Curves.css("--accent");
      g.fillRect(x + .5, y + .5, size - 2, size - 2);
    });
    var never = counts.filter(function (n) { return !n; }).length, least = Math.min.apply(null, counts);
    var skipped = Object.keys(more.skipped);
    set($("squares-says"), (least < most ? "from " + least + " to " + most : least) + (most === 1 ? " round each" : " rounds each") +
      (never ? "; " + never + " not yet" : "") +
      (run.clients > counts.length ? "; the first " + counts.length + " of " + run.clients : "") +
      (skipped.length ? "; messages left out of " + skipped.length + " clients" : ""));
  }

  // -- the moving network
  var film = (function () {
    var run = null, names = [], cache = new Map(), asked = {}, at = 0, playing = false, before = 0, chosen = null, wrong = "";
    function frame(t) {
      if (cache.has(t)) return cache.get(t);
      var first = t - (t - 1) % 10, key = run.id + " " + first;
      if (!asked[key]) {
        var id = run.id;
        asked[key] = true;
        fetch("/api/runs/" + id + "/network?from=" + first + "&to=" + Math.min(first + 9, run.done)).then(function (answer) {
          return answer.ok ? answer.json() : answer.text().then(function (why) { throw new Error(why); });
        }).then(function (found) {
          delete asked[key];
          if (!run || run.id !== id) return;
          if (cache.size > 200) cache.clear();
          found.rounds.forEach(function (r) { cache.set(r.round, r); });
          paint();
        }).catch(function (e) { wrong = e.message; paint(); });
      }
      return null;
    }
    function places(t, step) {
      var f = frame(t);
      return f ? f.steps[Math.min(step, f.steps.length - 1)].places : null;
    }
    function paint() {
      if (!run || $("network").hidden) return;
      var canvas = $("film"), scale = window.devicePixelRatio || 1, side = canvas.clientWidth;
      if (!side) return;
      if (canvas.width !== Math.round(side * scale)) canvas.width = canvas.height = Math.round(side * scale);
      var g = canvas.getContext("2d");
      g.setTransform(scale, 0, 0, scale, 0, 0);
      g.clearRect(0, 0, side, side);
      var t = Math.min(Math.floor(at) + 1, run.done), f = frame(t);
      if (wrong) { set($("film-says"), wrong); return; }
      if (!f) return;
      var exact = (at - Math.floor(at)) * f.steps.length, step = Math.min(Math.floor(exact), f.steps.length - 1), part = exact - step;
      var now = f.steps[step], next = step + 1 < f.steps.length ? f.steps[step + 1].places : t < run.done ? places(t + 1, 0) || now.places : now.places;
      var edge = 14, x = [], y = [];
      for (var i = 0; i < now.places.length / 2; i++) {
        x.push(edge + (now.places[2 * i] * (1 - part) + next[2 * i] * part) * (side - 2 * edge));
        y.push(edge + (now.places[2 * i + 1] * (1 - part) + next[2 * i + 1] * part) * (side - 2 * edge));
      }
      var there = new Set(f.there), picked = {}, mine = null;
      f.sets.forEach(function (s) {
        s[1].forEach(function (m) { picked[m] = (picked[m] || 0) + s[0].length; });
        if (s[0].indexOf(chosen) >= 0) mine = s[1];
      });
      g.strokeStyle = Curves.css("--accent");
      g.globalAlpha = Math.max(.12, Math.min(.8, 40 / Math.max(now.links.length / 2, 1)));
      g.beginPath();
      for (i = 0; i < now.links.length; i += 2) { g.moveTo(x[now.links[i]], y[now.links[i]]); g.lineTo(x[now.links[i + 1]], y[now.links[i + 1]]); }
      g.stroke();
      g.globalAlpha = 1;
      if (mine) {
        g.strokeStyle = "#D55E00";
        g.lineWidth = 2;
        g.setLineDash([5, 3]);
        g.beginPath();
        mine.forEach(function (m) { g.moveTo(x[chosen], y[chosen]); g.lineTo(x[m], y[m]); });
        g.stroke();
        g.setLineDash([]);
        g.lineWidth = 1;
      }
      var n = x.length, size = Math.max(3, Math.min(8, 60 / Math.sqrt(n)));
      for (i = 0; i < n; i++) {
        g.beginPath();
        if (!there.has(i)) {
          g.strokeStyle = Curves.css("--soft");
          g.moveTo(x[i] - size, y[i] - size); g.lineTo(x[i] + size, y[i] + size);
          g.moveTo(x[i] + size, y[i] - size); g.lineTo(x[i] - size, y[i] + size);
          g.stroke();
          continue;
        }
        g.arc(x[i], y[i], size, 0, 7);
        g.fillStyle = picked[i] ? "#D55E00" : Curves.css("--accent");
        g.fill();
        if (picked[i]) {
          g.beginPath();
          g.arc(x[i], y[i], size + 2 + 5 * picked[i] / f.there.length, 0, 7);
          g.strokeStyle = "#D55E00";
          g.stroke();
        }
        if (i === chosen) { g.beginPath(); g.arc(x[i], y[i], size + 4, 0, 7); g.strokeStyle = Curves.css("--ink"); g.lineWidth = 2; g.stroke(); g.lineWidth = 1; }
        if (n <= 40) { g.fillStyle = Curves.css("--soft"); g.font = "10px sans-serif"; g.fillText(names[i] || i, x[i] + size + 3, y[i] + 3); }
      }
      canvas.nodes = { x: x, y: y };
      if (document.activeElement !== $("seek")) $("seek").value = t;
      var said = "Round " + t + (f.steps.length > 1 ? ", step " + (step + 1) + " of " + f.steps.length : "") + ": " + now.met + " meetings now.";
      if (f.sets.length) {
        said += " Orange: nodes in a dominating set that somebody combines, the wider the ring the more often.";
        said += chosen === null ? " Choose a node to see its own." : mine ? " " + (names[chosen] || "Node " + chosen) + " combines " + mine.map(function (m) { return names[m] || m; }).join(", ") + "." : " " + (names[chosen] || "Node " + chosen) + " combines nobody in this round.";
      }
      set($("film-says"), said);
    }
    function play(now) {
      if (!playing || !run) return;
      var wait = before ? Math.min((now - before) / 1000, .1) : 0;
      before = now;
      if (frame(Math.min(Math.floor(at) + 1, run.done))) at += wait * +$("speed").value;
      if (at >= run.done) at = run.state === "running" ? run.done - .001 : 0;
      paint();
      requestAnimationFrame(play);
    }
    function toggle(on) {
      playing = on;
      before = 0;
      set($("play"), on ? "pause" : "play");
      if (on) requestAnimationFrame(play);
    }
    $("play").addEventListener("click", function () { toggle(!playing); });
    $("seek").addEventListener("input", function () { at = +$("seek").value - 1; paint(); });
    $("film").addEventListener("click", function (e) {
      var spots = $("film").nodes;
      if (!spots) return;
      var best = null, near = 400;
      spots.x.forEach(function (x, i) {
        var d = Math.pow(x - e.offsetX, 2) + Math.pow(spots.y[i] - e.offsetY, 2);
        if (d < near) { near = d; best = i; }
      });
      chosen = best === chosen ? null : best;
      paint();
    });
    return {
      visit: function (now, called) {
        if (!run || run.id !== now.id) { cache.clear(); at = 0; chosen = null; wrong = ""; toggle(false); }
        else if (now.done < run.done) { cache.clear(); at = 0; }
        run = now;
        names = called;
        $("seek").max = run.done;
        paint();
      },
      leave: function () { run = null; playing = false; }
    };
  })();

  $("stop").addEventListener("click", function () {
    var id = open;
    $("stop").disabled = true;
    fetch("/api/runs/" + id + "/stop", { method: "POST", headers: { "X-Fedloom": "1" } }).then(function (answer) {
      if (answer.ok) return answer.json().then(function (run) { runs[id] = run; set($("said"), "It stops when this round is over, and can be resumed."); list(); detail(); });
      return answer.text().then(function (why) { set($("said"), why); detail(); });
    }).catch(function () { set($("said"), "The server did not answer."); $("stop").disabled = false; });
  });
  $("filter").addEventListener("input", list);
  $("none").addEventListener("click", function () { ticked = []; changed(); });
  $("x-axis").addEventListener("change", function () { how.x = $("x-axis").value; draw(); });
  $("join").addEventListener("change", draw);
  $("csv").addEventListener("click", function () {
    Curves.save("curves.csv", Curves.csv(panels().filter(function (p) { return charts[p.key]; }).map(function (p) { return charts[p.key].panel; }), AXES), "text/csv");
  });
  var wait, width = window.innerWidth;
  window.addEventListener("resize", function () {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(wait);
    wait = setTimeout(redraw, 150);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // -- events
  function listen() {
    var source = new EventSource("/api/events");
    var first = true;
    source.onmessage = function (event) {
      var news = JSON.parse(event.data);
      if (first) { runs = {}; first = false; } // after a break, the server says all of it again
      set($("root"), news.root);
      groups = news.groups;
      Object.assign(runs, news.runs);
      news.gone.forEach(function (id) { delete runs[id]; });
      Object.keys(rows).forEach(function (id) { if (!runs[id]) { rows[id].remove(); delete rows[id]; delete data[id]; } });
      if (open && !runs[open]) open = null;
      ticked = ticked.filter(function (id) { return runs[id]; });
      list();
      wanted().forEach(load);
      draw();
      detail();
    };
    source.onopen = function () { first = true; $("link").className = "small live"; set($("link"), "live"); };
    source.onerror = function () { $("link").className = "small"; set($("link"), "no connection; trying again …"); };
  }
  readHash();
  window.addEventListener("hashchange", function () { readHash(); changed(); });
  listen();
})();
