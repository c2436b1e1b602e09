"""A Ray whose answers a test writes down: nothing runs, and no wait takes time."""

from types import SimpleNamespace

from ray import exceptions

PENDING = object()
"""Value that never comes."""
PID = 1 << 30
"""A process that no system has."""


class Reference:
    """A value, an error, or nothing yet."""

    def __init__(self, value=None):
        self.value = value


class ScriptedActor:
    """Its methods answer what ``answers`` says of them, else None; what it was asked is written down."""

    def __init__(self, **answers):
        self.answers = {"alive": (PID, "here"), **answers}
        self.asked = []
        self.killed = False

    def ends(self):
        self.answers = dict.fromkeys([*self.answers, "interrupt"], ended())

    def freezes(self):
        self.answers = dict.fromkeys([*self.answers, "interrupt"], PENDING)

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)

        def remote(*arguments):
            self.asked.append((method, *arguments))
            return Reference(self.answers.get(method))

        return SimpleNamespace(remote=remote)


class ScriptedRay:
    """The part of Ray that the runtime's modules call; set it in the place of a module's ``ray``."""

    exceptions = exceptions

    def __init__(self):
        self.made = []
        """Class, options and arguments of each actor that was made."""
        self.next_actors = []
        """Those that are handed out; when there are no more, new ones that are there."""
        self.named = {}
        self.waits_s = []
        self.runs = True

    def remote(self, *functions, **settings):
        def of(cls):
            def options(**more):
                return SimpleNamespace(remote=lambda *arguments: self._make(cls, {**settings, **more}, arguments))

            return SimpleNamespace(options=options)

        return of(*functions) if functions else of

    def _make(self, cls, options, arguments):
        self.made.append((cls, options, arguments))
        return self.next_actors.pop(0) if self.next_actors else ScriptedActor()

    def wait(self, references, num_returns=1, timeout=None, fetch_local=True):
        self.waits_s.append(timeout)
        ready = [r for r in references if r.value is not PENDING]
        return ready, [r for r in references if r not in ready]

    def get(self, reference, timeout=None):
        if isinstance(reference, list):
            return [self.get(one, timeout) for one in reference]
        if reference.value is PENDING:
            raise exceptions.GetTimeoutError()
        if isinstance(reference.value, BaseException):
            raise reference.value
        return reference.value

    def kill(self, actor):
        actor.killed = True

    def is_initialized(self):
        return self.runs

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here")

    def get_actor(self, name, namespace):
        assert namespace == "collapipe"
        if name not in self.named:
            raise ValueError(name)
        return self.named[name]


def ended():
    return exceptions.RayActorError()


def failed(cause):
    return exceptions.RayTaskError("method", str(cause), cause, ip="here")
