"""What ``stateful=True`` does in Keras, by its backend: ``python docs/keras_stateful.py``, with Keras.

A learning rate of 0 keeps the weights, so that losses of the epochs differ only by the carried
state. The page of the comparison says what was found.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow", "torch"
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(15, 7, 3)).astype("float32")
y = x.mean(-1, keepdims=True)
for stateful in (True, False):
    keras.utils.set_random_seed(0)
    inputs = keras.Input(batch_shape=(5, 7, 3))
    hidden = keras.layers.LSTM(4, return_sequences=True, stateful=stateful)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    history = model.fit(x, y, batch_size=5, shuffle=False, epochs=3, verbose=0).history
    print(stateful, history["loss"])
