"""What can go wrong inside the engine, grouped by whose fault it is."""


class EngineError(Exception):
    """The engine could not do what it was asked."""


class InvalidRequest(EngineError):
    """The caller's fault: a field is malformed, out of range, or can never fit.

    `param` names the field as the caller wrote it; the message says what is wrong and what to do.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message


class ModelLoadError(EngineError):
    """The operator's fault: weights, configuration or tokenizer cannot be used; the message says why."""


class InvalidConfig(EngineError):
    """The operator's fault: an engine setting is out of range or not supported; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param
        self.message = message


class DeviceFailed(EngineError):
    """The device fails whatever it is given: hand every request over and restart the process."""
