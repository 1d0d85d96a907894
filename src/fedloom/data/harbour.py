"""A small text that needs no download: eight people of a harbour, each with their own phrases.

What they say is composed of these by a named random stream, so it is the same everywhere; no
third-party text is in it.
"""

from __future__ import annotations

from fedloom.streams import stream

_LINES = 110  # that each of them says

#: how each begins, what is spoken of, what it does, and how a line ends
_PEOPLE: dict[str, tuple[str, str, str, str]] = {
    "baker": (
        "Good morning|Mind the step|Listen|Every day but Sunday|Before the lamps are out",
        "the rye dough|my oven|a warm loaf|the miller's flour|the apprentice|the smell of bread",
        "rises slowly|wants more time|fills the whole street|is never late|burns if you look away",
        "and so we wait|as it always has|said my mother|you can pay tomorrow|take two",
    ),
    "captain": (
        "All hands|By my watch|Mark this in the log|Aye|South of the point",
        "the old schooner|a falling glass|the north wind|our anchor|the second mate|the tide",
        "holds steady|turns at noon|drags in the sand|will not wait for us|answers the helm",
        "so reef the sails|and God help us|sir|keep a sharp lookout|we sail at four",
    ),
    "doctor": (
        "Let me see|Breathe in|As I told your brother|Twice a day|Nothing to fear",
        "this fever|the left knee|a clean bandage|your pulse|the bitter syrup|a good night's sleep",
        "does more than you think|is a little quick|must be kept dry|will pass by Friday",
        "if you rest|and no more rum|open the window|come back in a week|please",
    ),
    "fisher": (
        "Out past the buoys|When the moon is thin|I tell you|Last night|In my father's time",
        "the herring|a torn net|the little boat|one big cod|the grey seal|the cold water",
        "came up shining|went straight to the deep|pulled like a mule|smelled of rain|gave us none",
        "and not a gull in sight|believe me or not|so we rowed home|hand me the knife|that was all",
    ),
    "keeper": (
        "From up here|Three flashes|At the turn of the hour|Nobody asks|Since the storm",
        "the great lamp|a ship without a name|the fog|my cat|the long stair|the oil can",
        "burns until dawn|shows green, then white|creeps over the rocks|counts every step|is empty",
        "and I write it down|as the rule says|then it is quiet|with nobody to tell|again",
    ),
    "merchant": (
        "For you, my friend|A fair price|Look closer|Between us|By the dozen",
        "this silk|a chest of tea|fine pepper|the customs house|a silver coin|the last barrel",
        "costs less than it should|came by the spring fleet|is worth its weight|hides nothing",
        "cash only|no questions|shake on it|you will thank me|ask anyone on the quay",
    ),
    "singer": (
        "Oh|Sing it low|One more verse|Under the green lantern|Come closer",
        "the girl from the island|a broken string|my heart|the slow dance|the rain|an old waltz",
        "goes round and round|remembers the summer|leaves on the morning boat|weeps a little",
        "la la la|and round again|my darling|so fill the glasses|until the candles die",
    ),
    "teacher": (
        "Open your books|Who can tell me|Quiet at the back|For tomorrow|Once more",
        "the longest river|a half of twelve|the letter Q|this sentence|the map|the number nine",
        "is on page forty|has only one answer|comes before the comma|needs a capital|stands alone",
        "so write it down|and check your sums|hands up|without looking it up|in your own words",
    ),
}  # fmt: skip


def texts() -> dict[str, str]:
    """What each of them says.

    >>> said = texts()
    >>> len(said), sum(map(len, said.values())) // 1000
    (8, 58)
    """
    return {who: "\n".join(_lines(who)) + "\n" for who in _PEOPLE}


def _lines(who: str) -> list[str]:
    draw = stream(0, "harbour", who)
    parts = [phrases.split("|") for phrases in _PEOPLE[who]]
    out = []
    for _ in range(_LINES):
        begin, thing, deed, end = (p[int(draw.integers(len(p)))] for p in parts)
        out.append(f"{begin}: {thing} {deed}, {end}.")
    return out
