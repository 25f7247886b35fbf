import numpy as np

from aioinfer.errors import RequestError
from aioinfer.scheduler.features import StepFeature
from aioinfer.scheduler.request import Use
from example_features.only_even.sections import EvenRows


class OnlyEven(Use):
    feature = "only_even"


class Planning(StepFeature):
    name = "only_even"
    extra_args = ("only_even",)

    @classmethod
    def use_of(cls, submitted, index):
        wanted = submitted.params.extra_args.get("only_even", False)
        if not isinstance(wanted, bool):
            raise RequestError("only_even must be true or false", param="vllm_xargs")
        return OnlyEven() if wanted else None

    def plan(self, rows):
        return EvenRows(np.array([row.place for row in rows], np.int32))
