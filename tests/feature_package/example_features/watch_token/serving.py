from dataclasses import dataclass, replace

from aioinfer.features.serving import ServingFeature
from aioinfer.scheduler.features import Variant


@dataclass(frozen=True, slots=True)
class Watched(Variant):
    def asked_by(self, params):
        return replace(params, extra_args={**params.extra_args, "watch_token": 42})


class Serving(ServingFeature):
    name = "watch_token"

    def variants(self):
        model = self.config.served_model_names[0]
        return {f"{model}-watched": Watched(f"{model}-watched", model, "watched", 0)}
