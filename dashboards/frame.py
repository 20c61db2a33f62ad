"""The HTML around a page: head with the links to all pages, its cards in a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import panel as pn
from bokeh.document import Document

from daskserve.dashboards.page import Html, Page
from daskserve.dashboards.theme import FONT, Theme

_TEMPLATE = """
{% extends base %}
{% block title %}{{ page_title | e }} - daskserve{% endblock %}
{% block postamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{{ css }}</style>
{% endblock %}
{% block contents %}
<header>
  <a class="brand" href="live">daskserve</a>
  <nav>{% for path, name in links %}
    <a href="{{ path }}"{% if path == current %} aria-current="page"{% endif %}>{{ name | e }}</a>
  {% endfor %}</nav>
  <span class="source" title="{{ source | e }}">{{ source | e }}</span>
  <button id="theme" type="button" aria-label="Light or dark colours">{{ other_theme }}</button>
</header>
<div class="status">{{ embed(roots.status) }}</div>
<main>
  {% for card in cards %}
  <section class="{{ card.width }}" id="{{ card.slug }}">
    {% if card.title %}
    <h2>{{ card.title | e }}<small>{{ card.note | e }}</small></h2>
    {% endif %}
    {{ embed(roots[card.slug]) }}
  </section>
  {% endfor %}
</main>
<script>
document.getElementById("theme").onclick = () => {
  document.cookie = "{{ cookie }}={{ other_theme }}; path=/; SameSite=Strict; max-age=31536000";
  location.reload();
};
</script>
{% endblock %}
"""

COOKIE = "daskserve_theme"


class _Frame(pn.Template):
    """Adds all cards in one go: else each one has every model of the page looked through anew."""

    def server_doc(self, doc: Document | None = None, *given: Any, **more: Any) -> Document:
        document = doc or pn.state.curdoc
        with document.models.freeze():
            return super().server_doc(document, *given, **more)


def framed(page: Page, status: Html, links: Sequence[tuple[str, str]]) -> pn.Template:
    """The page as a whole document.

    Parameters
    ----------
    status
        Shown above the cards.
    links
        Path and name of every page.
    """
    theme = page.theme
    template = _Frame(_TEMPLATE)
    for name, value in (
        ("page_title", page.title),
        ("links", list(links)),
        ("current", page.path),
        ("source", page.feed.source.name),
        ("other_theme", "light" if theme.name == "dark" else "dark"),
        ("cookie", COOKIE),
        ("css", _css(theme)),
        ("app_favicon", ""),
    ):
        template.add_variable(name, value)
    template.add_panel("status", status)
    cards = []
    for number, card in enumerate(page.cards):
        slug = f"card-{number}"
        cards.append({"title": card.title, "note": card.note, "width": card.width, "slug": slug})
        template.add_panel(slug, card.body)
    template.add_variable("cards", cards)
    return template


def _css(theme: Theme) -> str:
    scheme = theme.name
    return f"""
    :root {{
      color-scheme: {scheme};
      --bokeh-base-font: {FONT};
      --panel-primary-color: {theme.accent};
      --panel-background-color: {theme.card};
      --panel-on-background-color: {theme.text};
      --panel-surface-color: {theme.card};
      --panel-on-surface-color: {theme.text};
      --design-background-color: {theme.card};
      --design-surface-color: {theme.card};
      --design-background-text-color: {theme.text};
      --design-surface-text-color: {theme.text};
      --background-color: {theme.card};
      --color: {theme.text};
      --surface-background-color: {theme.card};
      --surface-text-color: {theme.text};
    }}
    html, body {{ background: {theme.page}; color: {theme.text}; font-family: {FONT}; }}
    body {{ min-height: 100%; height: auto; font-size: 14px; }}
    header {{
      display: flex; flex-wrap: wrap; align-items: center; gap: 6px 18px;
      padding: 10px 20px; background: {theme.card}; border-bottom: 1px solid {theme.line};
    }}
    header a {{ color: {theme.muted}; text-decoration: none; padding: 4px 2px; }}
    header a:hover, header a[aria-current] {{ color: {theme.text}; }}
    header a[aria-current] {{ border-bottom: 2px solid {theme.accent}; }}
    header .brand {{ font-weight: 700; font-size: 17px; color: {theme.text}; }}
    nav {{ display: flex; flex-wrap: wrap; gap: 4px 16px; }}
    .source {{
      margin-left: auto; color: {theme.muted}; max-width: 34ch; overflow: hidden;
      text-overflow: ellipsis; white-space: nowrap;
    }}
    #theme {{
      border: 1px solid {theme.line}; border-radius: 6px; padding: 4px 10px; cursor: pointer;
      background: transparent; color: {theme.text}; font: inherit;
    }}
    main {{
      display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px;
      padding: 14px 20px 30px; max-width: 1800px; margin: 0 auto;
    }}
    .status {{ max-width: 1760px; margin: 0 auto; padding: 0 20px; }}
    section {{
      min-width: 0;
      background: {theme.card}; border: 1px solid {theme.line}; border-radius: 10px;
      padding: 12px 14px;
    }}
    section.bare {{ background: none; border: none; padding: 0; }}
    .full, .bare {{ grid-column: 1 / -1; }}
    h2 {{ font-size: 15px; font-weight: 600; margin: 0 0 8px; }}
    h2 small {{ color: {theme.muted}; font-weight: 400; font-size: 13px; margin-left: 10px; }}
    @media (max-width: 1000px) {{
      main {{ grid-template-columns: minmax(0, 1fr); padding: 12px; }}
      .source {{ margin-left: 0; max-width: 60vw; }}
    }}
    """
