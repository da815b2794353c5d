"""What a step returns has bobbin's names too."""

from fluxutils_py.training.step_info import StepInfo


def test_bobbins_names_are_the_same_values():
    info = StepInfo(0.5, 3, {"accuracy": 1.0})
    assert (
        (info.loss, info.loss_aux_out)
        == (info.batch_loss, info.metrics)
        == (0.5, {"accuracy": 1.0})
    )
    assert (StepInfo(None).n_live, StepInfo(None).metrics) == (1, {})
