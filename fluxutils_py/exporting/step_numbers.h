/* Numbers of the activations, for steps and for the kernels of windows. */

/* (2**r - 1) / r for r from -1/2 to 1/2: the coefficients of a polynomial, the highest power first, with relative errors
 * of 2.1e-8 and 5.4e-17 at most. From csrc/fit_exp2.py. */
#define STEP_EXP2_FLOAT(first, next) \
    first(0.000154035122f) next(0.00133907353f) next(0.00961823761f) next(0.0555035733f) next(0.240226492f) \
    next(0.693147182f)
#define STEP_EXP2_DOUBLE(first, next) \
    first(4.4455372281554426e-10) next(7.0725617019303202e-09) next(1.0178121299165704e-07) \
    next(1.3215442724231127e-06) next(1.5252733701214656e-05) next(0.0001540353044148068) \
    next(0.0013333558146531633) next(0.0096181291076070652) next(0.055504108664821236) \
    next(0.24022650695910097) next(0.69314718055994529)

/* psigmoid reaches 0 and 1 at -STEP_REACH and STEP_REACH; ptanh is constant beyond -STEP_KNEE and STEP_KNEE. */
#define STEP_REACH 4.1
#define STEP_KNEE 1.92033
#define STEP_PLATEAU 0.96016
#define STEP_BEND 0.26037
