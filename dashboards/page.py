"""What all pages have in common: cards for the frame, and what they do when there is news."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import panel as pn
from bokeh.document import Document
from bokeh.models import Div
from panel.io.state import set_curdoc

from daskserve.dashboards.feed import Feed
from daskserve.dashboards.theme import FONT, Theme, escape


@dataclass(frozen=True, slots=True)
class Card:
    """One box of a page.

    Parameters
    ----------
    title
        Plain text; empty for a box without a head.
    width
        ``half`` or ``full`` of a wide window; all are full in a narrow one. ``bare`` is full and
        has no box.
    note
        Plain text beside the title: units, how to read it.
    """

    title: str
    body: Any
    width: str = "half"
    note: str = ""


class Page(pn.viewable.Viewer):
    """A page over one feed for one session; also a component for notebooks.

    Parameters
    ----------
    feed
        The shared history.
    theme
        Colours of this session.
    """

    title = ""
    path = ""
    extensions: tuple[str, ...] = ()
    """Of Panel, whose scripts the browser loads for this page; ``tabulator`` for tables."""

    def __init__(self, feed: Feed, theme: Theme, **params: Any) -> None:
        super().__init__(**params)
        self.feed, self.theme = feed, theme
        self._document: Document | None = pn.state.curdoc
        self.cards: list[Card] = []

    def update(self) -> None:
        """The feed has something new; called on the session's thread."""

    def soon(self, call: Callable[[], None]) -> None:
        """Run it with the session's document held, as charts and `Html` need it. Any thread.

        What widgets call when they change does not hold it. Without a session, in tests and
        notebooks, it runs at once.
        """
        document = self._document
        if document is None:
            call()
            return

        def run() -> None:
            with set_curdoc(document):
                call()

        document.add_next_tick_callback(run)

    def close(self) -> None:
        """The session has ended."""

    def __panel__(self) -> pn.viewable.Viewable:
        heads = [f"<h3>{escape(card.title)}</h3>" for card in self.cards]
        return pn.Column(
            *(
                pn.Column(pn.pane.HTML(head), card.body, sizing_mode="stretch_width")
                for head, card in zip(heads, self.cards, strict=True)
            ),
            sizing_mode="stretch_width",
        )


def empty_text(text: str) -> str:
    """What stands where there is nothing to show; plain text in, HTML out."""
    return f'<p class="empty">{escape(text)}</p>'


class Html(pn.viewable.Viewer):
    """A box of HTML whose updates send the text and nothing else; an empty one takes no room.

    Panel's own pane sends its style sheets along, with addresses on the internet.

    Parameters
    ----------
    style
        A style sheet for the box alone.
    """

    def __init__(self, text: str, style: str, **params: Any) -> None:
        super().__init__(**params)
        self._div = Div(
            text=text, stylesheets=[style], disable_math=True, sizing_mode="stretch_width",
            margin=0, visible=bool(text),
        )  # fmt: skip

    @property
    def object(self) -> str:
        """What stands in it."""
        text: str = self._div.text
        return text

    @object.setter
    def object(self, text: str) -> None:
        self._div.text = text
        if self._div.visible != bool(text):
            self._div.visible = bool(text)

    def __panel__(self) -> pn.viewable.Viewable:
        return pn.pane.Bokeh(self._div, sizing_mode="stretch_width", margin=0)


def html_pane(theme: Theme, css: str = "", text: str = "") -> Html:
    """HTML that we write ourselves, in the session's colours."""
    style = f"""
    :host {{ color: {theme.text}; font-size: 14px; font-family: {FONT}; }}
    .bk-clearfix {{ width: 100%; font-family: {FONT}; }}
    .empty {{ color: {theme.muted}; margin: 18px 2px; max-width: 70ch; line-height: 1.5; }}
    .muted {{ color: {theme.muted}; }}
    .good {{ color: {theme.good}; }} .bad {{ color: {theme.bad}; }}
    table {{ border-collapse: collapse; }}
    th, td {{ text-align: left; padding: 4px 14px 4px 0; vertical-align: top; }}
    th {{ color: {theme.muted}; font-weight: 500; }}
    td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
    {css}
    """
    return Html(text, style)
