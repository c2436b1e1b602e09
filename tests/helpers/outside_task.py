"""A task as somebody else would add it: one class, in a file that this repository does not know."""

from flower_app.tasks.classification import ClassificationTask
from flower_app.tasks.generated.generated_labels import classified
from flower_app.tasks.labelled import Examples


class LengthTask(ClassificationTask):
    """Tell long sentences from short ones."""

    name = "length"

    def generate(self, number: int, split: str, seed: int) -> Examples[str]:
        """Generate sentences, each with what it is."""
        texts = [text for text, _ in classified(number, split, seed)]
        labels = ["long" if len(text.split()) > 6 else "short" for text in texts]
        return Examples(texts, labels, labels, lambda row, _: f"generated sentence {row}", ("long", "short"))
