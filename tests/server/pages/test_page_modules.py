# SPDX-License-Identifier: Apache-2.0
"""The pages' modules by themselves, run in the browser: markdown to elements, Prometheus text to numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.pages.conftest import Page, Site
from tests.server.support import engine_of

pytestmark = pytest.mark.browser

DRAW = "const {renderMarkdown} = await import('/static/markdown.js'); const box = document.createElement('div');"

MARKDOWN = [
    ("plain", "<p>plain</p>"),
    ("two\nlines", "<p>two\nlines</p>"),
    ("one\n\ntwo", "<p>one</p><p>two</p>"),
    ("# A\n###### b", "<h1>A</h1><h6>b</h6>"),
    ("#no heading", "<p>#no heading</p>"),
    ("**bold** *it* ***both*** ~~gone~~", "<p><strong>bold</strong> <em>it</em> <strong><em>both</em></strong> <del>gone</del></p>"),
    ("__b__ _i_ snake_case_name 2 * 3 * 4", "<p><strong>b</strong> <em>i</em> snake_case_name 2 * 3 * 4</p>"),
    ("**open and *closed*", "<p>**open and <em>closed</em></p>"),
    ("*a **b* c**", "<p><em>a **b</em> c**</p>"),
    (r"\*not\* a \_mark\_ \(x_1 + y_2\)", r"<p>*not* a _mark_ \(x_1 + y_2\)</p>"),
    ("`code *x*` ``a ` b`` `` ` `` `open", "<p><code>code *x*</code> <code>a ` b</code> <code>`</code> `open</p>"),
    ("<b>&amp;</b>", "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>"),
    ("```py\n<x> *y*\n\n  z\n```\nafter", "<CODE py>&lt;x&gt; *y*\n\n  z</CODE><p>after</p>"),
    ("~~~\n```\n~~~", "<CODE text>```</CODE>"),
    ("````\n```\n````", "<CODE text>```</CODE>"),
    ("```js\nnot closed", "<CODE js>not closed</CODE>"),
    ("- a\n- b\n  - c\n    1. d\n- e", "<ul><li>a</li><li>b<ul><li>c<ol><li>d</li></ol></li></ul></li><li>e</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("- a\n\n- b\n\nend", "<ul><li>a</li><li>b</li></ul><p>end</p>"),
    ("1. a\n   ```\n   x\n     y\n   ```\n2. b", "<ol><li>a<CODE text>x\n  y</CODE></li><li>b</li></ol>"),
    ("text\n- item", "<p>text</p><ul><li>item</li></ul>"),
    ("- a\n1. b", "<ul><li>a</li></ul><ol><li>b</li></ol>"),
    ("> q\n> > r\n\np", "<blockquote><p>q</p><blockquote><p>r</p></blockquote></blockquote><p>p</p>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    (
        "| a | b |\n|---|:-:|\n| 1 | `x\\|y` |\n| 2 |",
        "<TABLE><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><code>x|y</code></td></tr><tr><td>2</td></tr></tbody></TABLE>",
    ),
    ("a | b\nno table", "<p>a | b\nno table</p>"),
    ("[l](http://a.b/c_d_e) <https://x.y>", "<p><A http://a.b/c_d_e>l</A> <A https://x.y>https://x.y</A></p>"),
    ("see http://a.b/c. (http://d.e/f)", "<p>see <A http://a.b/c>http://a.b/c</A>. (<A http://d.e/f>http://d.e/f</A>)</p>"),
    ("[x](javascript:alert(1)) [y](data:a) [z](/v1)", "<p>[x](javascript:alert(1)) [y](data:a) [z](/v1)</p>"),
    ("![p](https://h.i/j.png)", "<p><A https://h.i/j.png>image: p</A></p>"),
    ("**[b](http://a.b)**", "<p><strong><A http://a.b>b</A></strong></p>"),
    ("", ""),
]


@pytest.fixture
def page(serve: Callable[..., Site], visit: Callable[..., Page]) -> Page:
    return visit(serve(engine_of("x")).url, "dashboard")


def run(page: Page, body: str, *values: Any) -> Any:
    """An async function body in the page."""
    script = "const [values, done] = [[...arguments].slice(0, -1), arguments[arguments.length - 1]];"
    script += f"(async () => {{ {body} }})().then((value) => done({{value}}), (error) => done({{error: String(error.stack)}}));"
    answer = page.driver.execute_async_script(script, *values)
    assert "error" not in answer, answer["error"]
    return answer.get("value")


def brief(html: str) -> str:
    """Without what is the same in every listing, table and link."""

    html = re.sub(
        r'<div class="code"><div><span>(\w+)</span><button[^>]*>Copy</button></div><pre tabindex="0"><code>(.*?)</code></pre></div>',
        r"<CODE \1>\2</CODE>",
        html,
        flags=re.DOTALL,
    )
    html = re.sub(r'<div class="table" tabindex="0"><table>(.*?)</table></div>', r"<TABLE>\1</TABLE>", html.replace(' scope="col"', ""))
    return re.sub(r'<a href="([^"]*)" target="_blank" rel="noopener noreferrer">(.*?)</a>', r"<A \1>\2</A>", html)


def test_markdown_becomes_these_elements(page: Page) -> None:
    body = (
        DRAW
        + "return values[0].map((text) => { const box = document.createElement('div'); renderMarkdown(box, text); return box.innerHTML; });"
    )
    drawn = run(page, body, [text for text, _ in MARKDOWN])
    assert [(text, brief(html)) for (text, _), html in zip(MARKDOWN, drawn, strict=True)] == MARKDOWN


def test_answer_that_grows_letter_by_letter_ends_as_if_drawn_once(page: Page) -> None:
    text = "\n\n".join(text for text, _ in MARKDOWN)
    body = (
        DRAW
        + """
      const fresh = document.createElement('div');
      for (let end = 0; end <= values[0].length; end++) {
        renderMarkdown(box, values[0].slice(0, end));
        if (end % 7) continue;
        const fresh = document.createElement('div');
        renderMarkdown(fresh, values[0].slice(0, end));
        if (fresh.innerHTML !== box.innerHTML) return values[0].slice(0, end);
      }"""
    )
    assert run(page, body, text) is None


def test_blocks_that_are_done_keep_their_elements(page: Page) -> None:
    body = (
        DRAW
        + """
      renderMarkdown(box, 'one\\n\\n```py\\nx');
      const [first, listing] = box.children;
      renderMarkdown(box, 'one\\n\\n```py\\nx = 1\\n```\\n\\nend');
      return [box.children[0] === first, box.children[1] === listing, listing.querySelector('code').textContent, box.children.length];"""
    )
    assert run(page, body) == [True, True, "x = 1", 3]


HARD = [
    "[",
    "*a ",
    "**a",
    "`",
    "`` ` ",
    "_a_",
    "> ",
    "- ",
    "  - ",
    "# ",
    "~~",
    "![",
    "<http://",
    "|",
    "](",
    "***",
    "http://a",
    "1. ",
    "\\",
    "- - ",
]


def test_no_text_takes_more_than_linear_time(page: Page) -> None:
    """Thousands of each mark; a scan that starts over at every mark would not come back before the script's time limit."""
    texts = "[mark.repeat(40000), (mark + '\\n').repeat(4000)]"
    body = f"{DRAW} for (const mark of values[0]) for (const text of {texts}) renderMarkdown(box, text + 'x'); return true;"
    assert run(page, body, HARD) is True


EXPOSITION = """# HELP whalefall:n text
# TYPE whalefall:n gauge
whalefall:n{engine="0",model_name="a \\"b\\" {c}, d=\\"e\\""} 3.0
whalefall:n{engine="1",model_name="x"} 4.0
whalefall:t_seconds_bucket{engine="0",le="0.1"} 0.0
whalefall:t_seconds_bucket{engine="0",le="1.0"} 4.0
whalefall:t_seconds_bucket{engine="0",le="10.0"} 8.0
whalefall:t_seconds_bucket{engine="0",le="+Inf"} 10.0
whalefall:t_seconds_count{engine="0"} 10.0
whalefall:t_seconds_sum{engine="0"} 55.0
other:n 9.0
"""


def test_metrics_are_read_and_added_up_over_engines(page: Page) -> None:
    body = """
      const {Sample} = await import('/static/metrics.js'); const sample = new Sample(values[0], 1);
      return [sample.value('n'), sample.value('n', {engine: '1'}), sample.value('absent'), sample.labelValues('n', 'model_name'),
              sample.isEmpty, new Sample('other:n 9.0', 1).isEmpty];"""
    assert run(page, body, EXPOSITION) == [7, 4, None, ['a "b" {c}, d="e"', "x"], False, True]


def test_quantiles_lie_where_prometheus_puts_them(page: Page) -> None:
    body = """
      const {Sample, quantile, mean} = await import('/static/metrics.js');
      const histogram = new Sample(values[0], 1).histogram('t_seconds');
      return [...[0.2, 0.4, 0.6, 0.8, 0.9].map((q) => quantile(histogram, q)), mean(histogram), quantile({...histogram, count: 0}, 0.5)];"""
    *points, mean, nothing = run(page, body, EXPOSITION)
    assert [(round(point["value"], 9), point["is_bound"]) for point in points] == [(0.55, ""), (1, ""), (5.5, ""), (10, ""), (10, "above")]
    assert mean == 5.5 and nothing is None
    low = run(page, body, EXPOSITION.replace('le="0.1"} 0.0', 'le="0.1"} 3.0'))
    assert low[0] == {"value": 0.1, "is_bound": "below"}


def test_counters_that_fell_give_no_rate(page: Page) -> None:
    body = """
      const {Sample, rate, rise, histogramRise} = await import('/static/metrics.js');
      const [a, b] = values.map((text, i) => new Sample(text, 10 + 4 * i));
      return [rate(a, b, 'n', {engine: '1'}), rise(a, b, 'n'), rate(b, a, 'n'), rise(a, b, 'absent'), histogramRise(b, a, 't_seconds'),
              histogramRise(a, b, 't_seconds').count];"""
    later = EXPOSITION.replace('"x"} 4.0', '"x"} 12.0').replace('_count{engine="0"} 10.0', '_count{engine="0"} 13.0')
    assert run(page, body, EXPOSITION, later) == [2, 8, None, None, None, 3]
