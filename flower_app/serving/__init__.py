"""The door of a model that answers: OpenAI's API over the serving engine."""
