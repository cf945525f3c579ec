# A message to a closed stream must not be written to a file that has its descriptor.
in=$GOLDEN/fsdp2_adamw/ckpt
reshard convert "$in" a --mesh 3 --preset fsdp >&-
echo "exit $?"
reshard convert "$in" b --mesh 3 --preset fsdp <&- >&- 2>&-
echo "exit $?"
reshard convert "$in" c --mesh 3 --preset fsdp -q <&- >&- 2>&-
echo "exit $?"
reshard merge "$in" d 2>&-
echo "exit $?"
for out in a b c; do try diff "$in" $out; done
try verify d
reshard inspect "$in" >&-
echo "exit $?"
reshard inspect "$in" > /dev/full
echo "exit $?"
reshard digest "$in" > /dev/full
echo "exit $?"
reshard extract "$in" model.up.weight - > /dev/full
echo "exit $?"
