"use strict";
// The page is whole without this. It adds what moves: live figures, a slider over the samples, the
// cursor of a chart, the steps of a game, and a button that copies.

const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// --- live figures: one stream; a new version, and its loss, bring the page's own parts anew ---

const PARTS = ["now", "story", "curves", "activity", "versions"];
let shown = null;
let measured = null; // the newest loss, in words

async function renew(tries = 4) {
  const answer = await fetch(location.pathname, { headers: { accept: "text/html" } });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const version = fresh.querySelector('[data-live="version"]');
  const loss = fresh.querySelector('[data-live="loss"]');
  const late = version && Number(version.textContent) < Number(shown);
  if (late || (tries && loss && loss.textContent !== measured)) {
    setTimeout(renew, 1000, Math.max(0, tries - 1)); // that page was made a moment before
    return;
  }
  for (const id of PARTS) {
    const old = document.getElementById(id), now = fresh.getElementById(id);
    if (!now || (old && old.contains(document.activeElement))) continue;
    if (old) old.replaceWith(document.adoptNode(now));
    else document.querySelector("[data-run]").append(document.adoptNode(now));
  }
  dress();
}

function tell(state) {
  for (const place of all("[data-live]")) {
    const value = state[place.dataset.live];
    if (value === undefined) continue;
    if (place.tagName === "PROGRESS") place.value = Number(value);
    else if (place.textContent !== value) place.textContent = value;
  }
  if (shown !== null && shown !== state.version) {
    const said = document.querySelector("[data-said]");
    if (said) {
      said.textContent = `Version ${state.version} is here`;
    }
  }
  if (shown !== null && (shown !== state.version || measured !== state.loss)) {
    setTimeout(renew, Math.random() * 1500); // everybody hears it at once
  }
  shown = state.version;
  measured = state.loss;
}

// A browser opens a stream again that was cut, and never one that was answered by anything but 200:
// a proxy says 502 while its coordinator restarts. So every end is followed by a new stream.
const LATE_MS = 8000; // without a stream for so long the figures are marked as old
const SILENT_MS = 50000; // three beats of the server: a stream that tells nothing is over
const AGAIN_MS = 5000;

function listen() {
  const run = document.querySelector("[data-run]"), said = document.querySelector("[data-old]");
  if (!run || !window.EventSource) return;
  shown = document.querySelector('[data-live="version"]').textContent;
  measured = document.querySelector('[data-live="loss"]').textContent;
  let stream = null, again = 0, heard = Date.now(), lost = 0;
  const close = () => { clearTimeout(again); if (stream) stream.close(); stream = null; };
  const hear = () => { heard = Date.now(); lost = 0; mark(); };
  const mark = () => {
    const old = lost && Date.now() - lost > LATE_MS;
    run.classList.toggle("old", Boolean(old));
    said.hidden = !old;
    const minutes = Math.floor((Date.now() - heard) / 60000);
    const text = `The coordinator does not answer: these figures are ${
      minutes ? `${minutes} min` : "less than a minute"} old.`;
    if (old && said.textContent !== text) said.textContent = text;
  };
  const open = () => {
    close();
    stream = new EventSource(run.dataset.run);
    stream.addEventListener("open", hear);
    stream.addEventListener("beat", hear);
    stream.addEventListener("state", (event) => { hear(); tell(JSON.parse(event.data)); });
    stream.addEventListener("error", lose);
  };
  const lose = () => {
    lost = lost || Date.now();
    if (!stream || stream.readyState !== EventSource.CLOSED) return;
    close();
    again = setTimeout(open, AGAIN_MS * (1 + Math.random())); // everybody lost it at once
  };
  setInterval(() => {
    if (stream && Date.now() - heard > SILENT_MS && !lost) { stream.close(); lose(); }
    mark();
  }, 1000);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else if (!stream) open();
  });
  if (!document.hidden) open();
}

// --- the slider over samples ---

function story(section) {
  const numbers = section.dataset.story.trim().split(" ");
  const box = document.createElement("p"), label = document.createElement("label");
  const input = document.createElement("input");
  box.className = "slider";
  label.textContent = "Version";
  label.htmlFor = input.id = "stop";
  Object.assign(input, { type: "range", min: 0, max: numbers.length - 1, value: numbers.length - 1 });
  input.setAttribute("aria-valuetext", `version ${numbers[numbers.length - 1]}`);
  let asked = 0;
  input.addEventListener("input", async () => {
    const number = numbers[input.value], mine = ++asked;
    input.setAttribute("aria-valuetext", `version ${number}`);
    const answer = await fetch(section.dataset.path + number);
    if (!answer.ok || mine !== asked) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const found = page.querySelector("[data-now]");
    if (found && mine === asked) {
      section.querySelector("[data-now]").replaceWith(document.adoptNode(found));
      games(section);
    }
  });
  box.append(label, input);
  const stops = section.querySelector(".stops");
  stops.before(box);
  stops.hidden = true;
}

// --- the cursor of a chart: pointer, or arrow keys ---

function chart(figure) {
  const points = figure.dataset.series.split(" ").map((text) => text.split(":").map(Number));
  const line = figure.querySelector(".cursor"), output = figure.querySelector("output");
  const canvas = figure.querySelector(".canvas");
  const heading = figure.querySelector("figcaption").textContent;
  const attributes = {
    role: "slider", tabindex: 0, "aria-label": heading,
    "aria-valuemin": 0, "aria-valuemax": points.length - 1,
  };
  for (const [name, value] of Object.entries(attributes)) canvas.setAttribute(name, value);
  let at = points.length - 1;
  const show = (place) => {
    at = Math.max(0, Math.min(points.length - 1, place));
    const [version, value, left] = points[at];
    line.setAttribute("x1", left);
    line.setAttribute("x2", left);
    line.setAttribute("visibility", "visible");
    output.textContent = `version ${version}: ${value}`;
    canvas.setAttribute("aria-valuenow", at);
    canvas.setAttribute("aria-valuetext", output.textContent);
  };
  show(at);
  const hide = () => { line.setAttribute("visibility", "hidden"); output.textContent = ""; };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), x = (1000 * (event.clientX - box.left)) / box.width;
    let best = 0;
    points.forEach((point, index) => { if (Math.abs(point[2] - x) < Math.abs(points[best][2] - x)) best = index; });
    show(best);
  });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 };
    if (event.key in steps) { event.preventDefault(); show(at + steps[event.key]); }
  });
  canvas.addEventListener("blur", hide);
  hide();
}

// --- the steps of a game ---

function game(board) {
  const stones = all("[data-ply]", board), box = document.createElement("p");
  const input = document.createElement("input"), label = document.createElement("label");
  box.className = "slider";
  label.textContent = "Move";
  label.htmlFor = input.id = `move-${board.dataset.game}`;
  Object.assign(input, { type: "range", min: 0, max: stones.length, value: stones.length });
  const mark = board.querySelector(".last"), said = document.createElement("output");
  const show = () => {
    const many = Number(input.value);
    stones.forEach((stone, index) => stone.setAttribute("visibility", index < many ? "visible" : "hidden"));
    const last = stones[many - 1];
    mark.setAttribute("visibility", last ? "visible" : "hidden");
    if (last) {
      mark.setAttribute("cx", last.getAttribute("cx"));
      mark.setAttribute("cy", last.getAttribute("cy"));
    }
    said.textContent = last ? `${many}: ${last.dataset.name}` : "the empty board";
    input.setAttribute("aria-valuetext", said.textContent);
  };
  input.addEventListener("input", show);
  box.append(label, input, said);
  board.after(box);
  show();
}

const games = (root) => all("svg[data-game]", root).filter((b) => !b.dataset.dressed).forEach((board) => {
  board.dataset.dressed = "1";
  game(board);
});

// --- joining ---

// The card that draws this page; its install line is opened. "" where the browser does not tell.
function drawnBy() {
  const gl = document.createElement("canvas").getContext("webgl");
  const info = gl?.getExtension("WEBGL_debug_renderer_info");
  const name = info ? gl.getParameter(info.UNMASKED_RENDERER_WEBGL) : "";
  return /nvidia/i.test(name) ? "cuda" : /\bamd\b|radeon/i.test(name) ? "rocm" : "";
}

function send(button, link) {
  button.href = `mailto:?subject=Join&body=${encodeURIComponent(link)}`;
  if (!navigator.share) return;
  button.addEventListener("click", (event) => {
    event.preventDefault();
    navigator.share({ url: link }).catch(() => {}); // closed without a choice
  });
}

function join() {
  const code = document.querySelector("[data-join]");
  if (!code) return;
  const safe = location.href.replace(/[^A-Za-z0-9:/#=+&%.~_[\]-]/g, "");
  if (location.hash.length > 1) { // the link was opened: its code stays behind the "#"
    code.textContent = `volunteer join '${safe}'`;
    all("[data-invited]").forEach((part) => { part.hidden = true; });
  }
  all("[data-send]").forEach((button) => send(button, safe));
  const card = document.querySelector(`ol > li > [data-card="${drawnBy() || "cpu"}"]`);
  if (card) card.open = true;
  if (!navigator.clipboard) return;
  for (const button of all("[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "Copied";
    });
  }
}

function dress() {
  all("[data-chart]").filter((f) => !f.dataset.dressed).forEach((figure) => { figure.dataset.dressed = "1"; chart(figure); });
  all("[data-story]").filter((s) => !s.querySelector(".slider input#stop")).forEach(story);
  games(document);
}

dress();
join();
listen();
