"""How fast responses grow, for engines that do not tell how far a cancelled one got."""

from dataclasses import dataclass


@dataclass
class Speed:
    """Tokens and seconds of the responses that ran to their end in this process."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a response that ran to its end."""
        self.tokens += tokens
        self.seconds += seconds

    def estimate(self, seconds: float) -> int:
        """Return how many tokens a response had after ``seconds``, if it ran like those; 0 if none did yet."""
        return int(seconds * self.tokens / self.seconds) if self.seconds else 0
