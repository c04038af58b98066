"""The automatic device mapping of HybridFlow, section 6: which models share which devices, in which layouts.

`search` is the paper's Algorithm 1, solved exactly; it asks the simulators, which are formulas, what each
model costs in a layout. `plan` goes from a request to the answer, docs/simulators.md has the equations and
their errors.

    what is mapped     trace, dataflow       an algorithm's calls, and the stages that they form (D)
                       shapes, workload      sizes of the models (L); rows, tokens, recipe of an iteration (W)
                       hardware, cluster     devices and links, of one kind or of several (N, Q);
                       machine               the known description of the present machine
    Algorithm 1        partitions            get_placements: which models share devices
                       allocate              enum_alloc, d_cost: how many devices each set of models gets
                       auto_parallel         get_min_alloc, auto_parallel (Algorithm 2): a layout per model
                       pareto                choices that no other one beats in everything
                       costs, simulated      simu: what the search asks, and the simulators that answer
    simulators         simulate              training, inference, and the transition to generation
                       generate              generation: prefill and decoding
                       layers, network       a layer of a micro-batch; a collective, both used by the above
                       memory                bytes of a device in each phase
                       estimate              a simulator's answer: seconds, and what they are spent on
    calibration        fit                   shares of the peaks that explain measured seconds best
                       calibrate, probe      measurements of the present machine, for `rlhf calibrate`
    a run, predicted   observe, phases       what each call of a run did; its seconds, predicted
                       measured              the file of a run's measurements, for `rlhf calibrate --from`
    the answer         plan, report, picture mappings and baselines; as text, JSON, YAML and a picture
"""
