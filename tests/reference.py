"""A slow, obvious reference straight from the paper: numpy, float64, plain loops.

Production code must equal these functions; nothing here imports torch or spikecal. Equation numbers count the
numbered equations of "A Free Lunch From ANN" (ICML 2021) from the top: 2-4 the neuron, 6 the mean spike,
10 clip_floor, 11 the MMSE threshold, 13-14 bias calibration, 15 clip_floor with an initial potential,
16 potential calibration, 17-18 weights calibration, 19 batch norm folding, 24 average pooling (appendix B).

Shapes: T time steps, N images, C channels or neurons, K outputs. A spike has the *value* of its threshold.
A neuron is a dict {"threshold": scalar or (C,), "v0": scalar, (C,) or (C, H, W), "bias": scalar or (C,)};
`v0` and `bias` default to 0, and `bias` is an extra constant current, added at every step.
"""

import math

import numpy as np


def relu(x):
    """h(.) of Eq. 1."""
    return np.maximum(np.asarray(x, np.float64), 0.0)


def per_channel(value, ndim):
    """A scalar, (C,) or (C, ...) parameter, shaped to broadcast against (N, C, ...) of `ndim` dimensions."""
    value = np.asarray(value, np.float64)
    if value.ndim == 0:
        return value
    return value.reshape((1, *value.shape) + (1,) * (ndim - 1 - value.ndim))


# -------------------------------------------------------------------------------- the neuron


def integrate_and_fire(current, threshold, v0=0.0):
    """Eq. 2-4, soft reset: v += I[t]; s = threshold where v >= threshold, else 0; v -= s.

    current (T, ...); threshold and v0 broadcast against one step (see `per_channel`).
    Returns the spikes (T, ...) and the potential after the last step (...).
    """
    current = np.asarray(current, np.float64)
    threshold = np.broadcast_to(np.asarray(threshold, np.float64), current.shape[1:])
    v = np.array(np.broadcast_to(np.asarray(v0, np.float64), current.shape[1:]))
    spikes = np.zeros_like(current)
    for t in range(len(current)):
        v = v + current[t]  # Eq. 2
        spikes[t] = np.where(v >= threshold, threshold, 0.0)  # Eq. 4
        v = v - spikes[t]  # Eq. 3
    return spikes, v


def fire(current, neuron):
    """`integrate_and_fire` for a neuron dict: current (T, N, C, ...) -> spikes (T, N, C, ...)."""
    ndim = np.ndim(current) - 1
    current = current + per_channel(neuron.get("bias", 0.0), ndim)
    threshold, v0 = per_channel(neuron["threshold"], ndim), per_channel(neuron.get("v0", 0.0), ndim)
    return integrate_and_fire(current, threshold, v0)[0]


def clip_floor(x, T, threshold, v0=0.0):
    """Eq. 10, and Eq. 15 with v0: threshold/T * clip(floor(T*x/threshold + v0/threshold), 0, T)."""
    x = np.asarray(x, np.float64)
    return threshold / T * np.clip(np.floor(T * x / threshold + v0 / threshold), 0, T)


def bias_shift(theta, T):
    """The constant current of Deng & Gu (2021), section 5.1 of the paper: half a quantum, 0.5 * theta / T."""
    return 0.5 * theta / T


# -------------------------------------------------------------------------------- thresholds


def max_threshold(x):
    """The largest activation (Diehl et al. 2015); 1.0 where nothing is positive."""
    return float(np.max(x)) if np.max(x) > 0 else 1.0


def percentile_threshold(x, q):
    """The smallest value v of relu(x) such that at least a share q of *all* values (zeros too) is <= v.

    That is the k-th smallest, k = ceil(q * n). If it is 0: the maximum; if that is <= 0 too: 1.0.
    """
    values = sorted(relu(x).ravel().tolist())
    k = max(1, math.ceil(q * len(values)))
    return values[k - 1] if values[k - 1] > 0 else max_threshold(x)


def balanced_threshold(x, iterations):
    """Local threshold balancing: θ grows from 0 by twice the mean of what it clips."""
    theta = 0.0
    for _ in range(iterations):
        theta += 2 * np.maximum(x - theta, 0).mean()
    return theta


def mmse_threshold(x, T, grid=100, shift=0.0):
    """Eq. 11 by brute force over max(x) * g / grid, g = 1..grid, with v0 = shift * threshold.

    x: the (pre-)activations of one layer or one channel, any shape. Returns the threshold with the smallest
    sum of squared errors (the smallest of equals) and the errors (grid,). Dead (max <= 0): 1.0, zeros.
    """
    x = np.asarray(x, np.float64).ravel()
    top, errors = x.max(), np.zeros(grid)
    if top <= 0:
        return 1.0, errors
    candidates = [float(top * g / grid) for g in range(1, grid + 1)]
    for g, theta in enumerate(candidates):
        errors[g] = np.sum((clip_floor(x, T, theta, v0=shift * theta) - relu(x)) ** 2)
    return candidates[int(np.argmin(errors))], errors  # argmin: the first of equals


def mmse_threshold_per_channel(x, T, grid=100, shift=0.0):
    """Eq. 11 for each channel by itself: x (N, C, ...) -> thresholds (C,), errors (C, grid)."""
    x = np.asarray(x, np.float64)
    found = [mmse_threshold(x[:, c], T, grid, shift) for c in range(x.shape[1])]
    return np.array([theta for theta, _ in found]), np.array([errors for _, errors in found])


# -------------------------------------------------------------------------------- a dense network
# layers: list of (W (out, in), b (out,)), a ReLU after each but the last, which is a readout without neuron.


def ann_forward(layers, x):
    """Eq. 1: x (N, in) -> [activations of each hidden layer (N, C)..., output (N, K)]."""
    values, h = [], np.asarray(x, np.float64)
    for i, (W, b) in enumerate(layers):
        z = h @ np.asarray(W, np.float64).T + b
        h = z if i == len(layers) - 1 else relu(z)
        values.append(h)
    return values


def snn_forward(layers, neurons, x, T):
    """Eq. 2-4 through the network: spike trains [(T, N, C) per hidden layer], outputs of each step (T, N, K).

    The image is a constant current at every step (direct coding). neurons[i] belongs to layers[i]; the
    readout (no neuron: it only integrates) may have a last entry {"bias": (K,)}. outputs.mean(0) is what to
    compare with the ANN (Eq. 6).
    """
    h = np.stack([np.asarray(x, np.float64)] * T)  # (T, N, in)
    trains = []
    for i, (W, b) in enumerate(layers):
        current = np.stack([h[t] @ np.asarray(W, np.float64).T + b for t in range(T)])  # (T, N, out)
        if i == len(layers) - 1:
            return trains, current + (neurons[i].get("bias", 0.0) if i < len(neurons) else 0.0)
        h = fire(current, neurons[i])
        trains.append(h)


# -------------------------------------------------------------------------------- a convolutional network


def conv2d(x, w, b=None, stride=1, padding=0, groups=1):
    """x (N, C, H, W), w (O, C/groups, kh, kw), b (O,) -> (N, O, H', W'); zero padding, cross-correlation."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    (sy, sx), (py, px) = np.broadcast_to(stride, 2), np.broadcast_to(padding, 2)
    x = np.pad(x, ((0, 0), (0, 0), (py, py), (px, px)))
    (n, _, height, width), (out, c, kh, kw) = x.shape, w.shape
    y = np.zeros((n, out, (height - kh) // sy + 1, (width - kw) // sx + 1))
    for o in range(out):
        first = o // (out // groups) * c  # the group's first input channel
        for i in range(y.shape[2]):
            for j in range(y.shape[3]):
                window = x[:, first : first + c, i * sy : i * sy + kh, j * sx : j * sx + kw]
                y[:, o, i, j] = (window * w[o]).sum((1, 2, 3)) + (0.0 if b is None else b[o])
    return y


def avg_pool2d(x, kernel, stride=None):
    """Eq. 24, appendix B: a depthwise convolution with the constant weight 1 / kernel**2."""
    channels = np.shape(x)[1]
    w = np.full((channels, 1, kernel, kernel), 1.0 / kernel**2)
    return conv2d(x, w, stride=stride or kernel, groups=channels)


def fold_batchnorm(w, b, mean, var, gamma, beta, eps=1e-5):
    """Eq. 19 for a layer in front of batch norm: W <- W gamma/sigma, b <- beta + (b - mu) gamma/sigma."""
    scale = np.asarray(gamma, np.float64) / np.sqrt(np.asarray(var, np.float64) + eps)
    return np.asarray(w) * scale.reshape(-1, *[1] * (np.ndim(w) - 1)), beta + (np.asarray(b) - mean) * scale


def residual_net_ann(params, x):
    """The residual net described in `residual_net_snn` as an ANN: dict of values by the same names."""
    a = relu(conv2d(x, **params["conv1"]))
    r = relu(conv2d(a, **params["conv2"]) + a)
    p = avg_pool2d(r, 2)
    out = p.reshape(len(p), -1) @ params["fc"]["w"].T + params["fc"]["b"]
    return {"conv1": a, "conv2": r, "pool": p, "out": out}


def residual_net_snn(params, neurons, x, T):
    """A residual net with two convolutions, one average pool and a readout, simulated step by step:

        a = IF1(conv1(x));  r = IF2(conv2(a) + a);  p = avg_pool2d(r, 2);  out = fc(flatten(p))

    params: {"conv1", "conv2": keyword arguments of `conv2d` (w, b, stride, padding, groups),
             "fc": {"w" (K, C*h*w), "b" (K,)}}; conv2 must keep the shape of a.
    neurons: {"conv1", "conv2": neuron dicts, "fc": optional {"bias" (K,)}, "pool": optional neuron dict: with
             it the pool is a spiking layer (Algorithm 1, line 2), without it p is a multiple of threshold/4}.
    x (N, C, H, W) is fed at every step. Returns {"conv1", "conv2", "pool": (T, N, C, h, w), "out" (T, N, K)}.
    """
    fc = params["fc"]
    a = fire(np.stack([conv2d(x, **params["conv1"]) for _ in range(T)]), neurons["conv1"])
    r = fire(np.stack([conv2d(a[t], **params["conv2"]) + a[t] for t in range(T)]), neurons["conv2"])
    p = np.stack([avg_pool2d(r[t], 2) for t in range(T)])
    if neurons.get("pool"):
        p = fire(p, neurons["pool"])
    out = np.stack([p[t].reshape(len(x), -1) @ fc["w"].T + fc["b"] for t in range(T)])
    return {"conv1": a, "conv2": r, "pool": p, "out": out + neurons.get("fc", {}).get("bias", 0.0)}


# -------------------------------------------------------------------------------- calibration


def channel_mean(e):
    """mu_c of Eq. 13, and the mean over the batch: (N, C, ...) -> (C,)."""
    e = np.asarray(e, np.float64)
    return np.array([e[:, c].mean() for c in range(e.shape[1])])


def bias_calibration(layers, x, T, thresholds, v0):
    """Eq. 13-14 and Algorithm 1, light pipeline, on a dense net: b_c += mu_c(e), e = x - mean spikes.

    Layer by layer, each behind a calibrated prefix. thresholds, v0: one entry per hidden layer.
    Returns the added biases, one vector per layer; the last is the readout's, mean(ANN - mean SNN output).
    """
    ann = ann_forward(layers, x)
    neurons = [{"threshold": th, "v0": v} for th, v in zip(thresholds, v0, strict=True)] + [{}]
    for i in range(len(layers)):
        trains, out = snn_forward(layers, neurons, x, T)
        s = [*trains, out][i].mean(0)  # (N, C), Eq. 6
        neurons[i]["bias"] = channel_mean(ann[i] - s)
    return [neuron["bias"] for neuron in neurons]


def potential_calibration(layers, x, T, thresholds, v0, biases=None):
    """Eq. 16 and Algorithm 1, advanced pipeline, on a dense net: v0 += T * (batch mean of e), per element.

    Layer by layer as `bias_calibration`; biases: optional extra currents of the hidden layers, left alone.
    Returns v0 of each hidden layer; the readout has no neuron, so no potential.
    """
    ann = ann_forward(layers, x)
    biases = biases or [0.0] * len(thresholds)
    neurons = [{"threshold": th, "v0": v, "bias": c} for th, v, c in zip(thresholds, v0, biases, strict=True)]
    for i, neuron in enumerate(neurons):
        s = snn_forward(layers, neurons, x, T)[0][i].mean(0)  # (N, C), Eq. 6
        neuron["v0"] = neuron["v0"] + T * (ann[i] - s).mean(0)
    return [neuron["v0"] for neuron in neurons]


def weight_calibration_sgd(W, b, s_mean, target, T, theta, v0, lr, momentum, iterations, batch_indices):
    """Eq. 17-18: W that minimises ||clip_floor(W s + b) - target||^2, by SGD. Returns the new W; b stays.

    s_mean (N, in): mean spikes into the layer; target (N, out): ANN activations behind it; theta, v0: scalar
    or (out,). Iteration k of K takes the n images batch_indices[k], at the rate lr * (1 + cos(pi k / K)) / 2:

        u = T z / theta + v0 / theta,  z = W s + b,  y = theta / T * clip(floor(u), 0, T)
        loss = 1/n sum_images sum_outputs (y - target)^2
        dy/dz = theta/T * [0 <= u <= T] * T/theta = [0 <= u <= T]   (floor' = 1, Eq. 18; clip' = 1 inside)
        dloss/dW = 2/n ((y - target) * [0 <= u <= T])^T s

    The window is on u, not on floor(u), and includes both ends: autograd through `clamp(ste_floor(u), 0, T)`
    would pass T < u < T+1 too. As in torch: buffer = momentum * buffer + gradient, W -= rate * buffer.
    """
    W, s_mean, target = (np.array(a, np.float64) for a in (W, s_mean, target))
    buffer = np.zeros_like(W)
    for k in range(iterations):
        s, goal = s_mean[batch_indices[k]], target[batch_indices[k]]
        z = s @ W.T + b  # (n, out)
        u = T * z / theta + v0 / theta
        error = clip_floor(z, T, theta, v0) - goal
        gradient = 2.0 / len(s) * (error * ((u >= 0) & (u <= T))).T @ s  # (out, in)
        buffer = momentum * buffer + gradient
        W = W - lr * (1 + math.cos(math.pi * k / iterations)) / 2 * buffer
    return W
