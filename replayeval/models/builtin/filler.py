"""Generated English for training: sentences that share their word pairs with a text but are new every time.

A small model learns a few megabytes by heart within some tens of passes, and then fails on any other text. Word pairs
drawn at random keep the vocabulary and local grammar and leave nothing to memorise.
"""

from collections.abc import Sequence

from replayeval.models.builtin.recall import Draws


class WordPairs:
    """A bigram model over words.

    Args:
        verses: Text to take the pairs from.
    """

    def __init__(self, verses: Sequence[str]) -> None:
        """Count the pairs."""
        self._starts: list[str] = []
        self._followers: dict[str, list[str]] = {}
        for verse in verses:
            words = verse.split()
            self._starts.append(words[0])
            for word, follower in zip(words, [*words[1:], ""], strict=True):
                self._followers.setdefault(word, []).append(follower)

    def verse(self, draws: Draws) -> str:
        """Return one new verse: from a word that starts verses to one that ends them, 60 words at most."""
        words = [draws.pick(self._starts)]
        while len(words) < 60:
            word = draws.pick(self._followers[words[-1]])
            if not word:
                break
            words.append(word)
        return " ".join(words)

    def verses(self, draws: Draws, size: int) -> list[str]:
        """Return new verses of at least `size` characters together."""
        made: list[str] = []
        total = 0
        while total < size:
            made.append(self.verse(draws))
            total += len(made[-1]) + 1
        return made
