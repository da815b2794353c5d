"""Tasks on several ranks."""


def test_ranks_with_unequal_batches_train_as_one_process(ran):
    ran("tasks", 3)
