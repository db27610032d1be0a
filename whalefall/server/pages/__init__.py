# SPDX-License-Identifier: Apache-2.0
"""The chat page and the dashboard: static files, and the routes that serve them. The pages use the public API like any other client.

static/ holds plain HTML, CSS and JavaScript modules; what is in there is what the browser runs, there is no build step:

  theme.js       light or dark, before the first paint     markdown.js   model text to elements, never through innerHTML
  chat.html      the page                                  api.js        models, streamed answers, errors
  chat.js        what happens when                         store.js      conversations in the browser's storage
  dashboard.html, dashboard.js (what is shown), metrics.js (Prometheus text, rates, percentiles), chart.js (one SVG line chart)
"""
