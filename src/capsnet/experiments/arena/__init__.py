"""The arena: every routing algorithm on the same compact network, the same seeds and an honest protocol.

Nothing changes between rows but the routing. The learning rate of each algorithm is chosen on validation images, from
one small grid and with one seed (`rates`); the cost of a training step is measured for all algorithms in one sitting
(`cost`); then the network is trained on all training images, and each test figure is drawn once (`compare`). `uniform`
is the control: the same network without any routing decision. A claim for an algorithm is a claim against it, made from
differences paired by seed. Algorithms of loaded plugins take part.
"""
