// Starts the page: the key field, the tabs, and each part of the page with what it shares (`context`).

import * as api from "./api.js";
import * as files from "./files.js";
import * as live from "./live.js";
import * as server from "./server.js";

const byId = (id) => document.getElementById(id);

// What each part gets beside its element:
// api                the module api.js
// announce(text)     has a screen reader say a text
// server             an EventTarget: "change" when `server.facts` (GET v1/server, or null) has changed
// styleNonce         for libraries that write <style> elements
const context = {
  api,
  announce(text) {
    byId("announcer").textContent = text;
  },
  server: server.state,
  styleNonce: document.querySelector("meta[name=style-nonce]").content,
};

function startKey() {
  const field = byId("key");
  const state = byId("key-state");
  byId("key-form").addEventListener("submit", (event) => event.preventDefault());
  const show = (text, wrong) => {
    state.textContent = text;
    state.classList.toggle("error", wrong);
    if (wrong) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  };
  field.addEventListener("change", () => {
    if (/^[\x20-\x7e]*$/.test(field.value)) api.key.set(field.value);
    else show("no key has such signs", true); // nor has a header
  });
  api.events.addEventListener("key", () => show("", false));
  api.events.addEventListener("unauthorized", () => show(api.key.value ? "not accepted" : "needed", true));
  server.state.addEventListener("change", () => {
    if (server.state.facts) show(api.key.value ? "accepted" : "not needed", false);
  });
}

// https://www.w3.org/WAI/ARIA/apg/patterns/tabs/, with the tab in the URL's fragment.
function startTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const show = (chosen) => {
    for (const tab of tabs) {
      const selected = tab === chosen;
      tab.setAttribute("aria-selected", String(selected));
      tab.tabIndex = selected ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !selected;
    }
  };
  for (const [index, tab] of tabs.entries()) {
    tab.addEventListener("click", () => {
      show(tab);
      history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
    });
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -index, End: tabs.length - 1 - index }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const next = tabs[(index + step + tabs.length) % tabs.length];
      next.focus();
      next.click();
    });
  }
  show(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
}

startKey();
startTabs();
server.start(byId("server"), context);
files.start(byId("files"), context);
live.start(byId("live"), context);
document.documentElement.dataset.ready = "true";
