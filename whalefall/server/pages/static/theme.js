// SPDX-License-Identifier: Apache-2.0
// Light, dark or as the system says. A classic script in the head, so that the first paint already has the right colours.
"use strict";
(() => {
  const KEY = "whalefall.theme";
  const NAMES = ["auto", "light", "dark"];

  function stored() {
    try {
      const name = localStorage.getItem(KEY);
      return NAMES.includes(name) ? name : "auto";
    } catch {
      return "auto"; // storage is blocked
    }
  }

  function apply(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  }

  apply(stored());
  addEventListener("storage", (event) => event.key === KEY && apply(stored()));
  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    choice.value = stored();
    choice.addEventListener("change", () => {
      apply(choice.value);
      try {
        localStorage.setItem(KEY, choice.value);
      } catch {
        // storage is blocked: the choice lasts as long as the page
      }
    });
  });
})();
