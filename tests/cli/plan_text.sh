reshard plan 'f32[4096,4096] : 2x4:S0,S1 -> 8:S1'
reshard plan --no-picture --ranks --pairs 'f32[8,8] : 2:S0 -> 2:S1'
reshard plan --no_picture --ranks-per-node 4 'f32[64,8] : 4:S0 -> 16:R'
reshard plan 'f32[64,64] : 64:S0 -> 64:S1'
LC_ALL=C reshard plan 'f32[8,8] : 4:P -> 4:R'
reshard plan --no-picture 'f32[0,8] : 4:S0 -> 4:R'
try plan 'f32[8,8] : 4:S0 -> bf16 2:S1' --no-picture
try plan 'bf16[8,8] : 4:P -> f32 4:R' --no-picture
try plan 'f8e4m3[8,8] : 4:S0 -> bf16 2:S1'
