"use strict";

// The theme: as the system has it, or as it was chosen here.
const themes = document.querySelector("[data-theme-switch]");
themes.value = localStorage.getItem("readie-theme") || "";
themes.addEventListener("change", () => {
  localStorage.setItem("readie-theme", themes.value);
  document.documentElement.dataset.theme = themes.value;
});

// Updates of the cluster: whether they come, and a button that holds them back.
const live = document.querySelector("[data-live]");
if (live) {
  const pause = document.querySelector("[data-pause]");
  let state = live.textContent;
  let paused = false;
  const held = new Map();
  const say = () => {
    const text = paused ? "Paused" : state;
    if (live.textContent !== text) live.textContent = text;
  };
  document.body.addEventListener("htmx:sseError", () => { state = "Not connected: trying again"; say(); });
  document.body.addEventListener("htmx:sseBeforeMessage", (event) => {
    if (event.target === live) {
      state = event.detail.data;
      say();
      event.preventDefault();
      return;
    }
    if (!paused) return;
    held.set(event.target, event.detail.data);
    event.preventDefault();
  });
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    if (!paused) {
      held.forEach((text, target) => htmx.swap(target, text, { swapStyle: "innerHTML" }));
      held.clear();
    }
    say();
  });
}

// The console: Control and Enter run the query, and the download has the query that is typed now.
const query = document.querySelector("[data-submits]");
if (query) {
  query.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) query.form.requestSubmit();
  });
  const copy = document.querySelector("[data-copy-of]");
  copy.form.addEventListener("submit", () => { copy.value = query.value; });
}
